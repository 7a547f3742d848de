"""Mark of tests that run programs in the sandbox."""

import pytest

from cdrmix.evaluation.sandbox.host import available_levels

_MISSING = available_levels()["kernel"].missing
needs_sandbox = pytest.mark.skipif(bool(_MISSING), reason=f"level kernel: {_MISSING}")
