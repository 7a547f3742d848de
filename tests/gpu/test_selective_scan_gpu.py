"""The selective scan on a CUDA device against the plain loop on the CPU."""

import pytest
import torch
from torch import Tensor

from cdrmix.models.selective_scan import ScanInputs, scan_reference, selective_scan
from cdrmix.models.selective_scan_cuda import obstacle
from tests.parity.test_mamba import assert_all_close, gradients, ids_of, random_inputs

pytestmark = pytest.mark.gpu

# bfloat16 rounds inputs and outputs by up to 2^-9 each.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["chunked", "mamba_ssm"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_forms_equal_the_loop(backend: str, is_packed: bool, dtype: torch.dtype) -> None:
    inputs = ScanInputs(*(x.to(dtype) for x in random_inputs(2, 120)))
    ids = ids_of([20, 60, 40], [64, 56]) if is_packed else None

    def results(device: str, form: str) -> list[Tensor]:
        leaves = [x.to(device).requires_grad_() for x in inputs]
        here = None if ids is None else ids.to(device)
        if form == "reference":
            outputs = scan_reference(ScanInputs(*(x.float() for x in leaves)), None, here)
        else:
            outputs = selective_scan(ScanInputs(*leaves), segment_ids=here, backend=form)
        found = [each.cpu().float() for each in outputs]
        return [*found, *(each.cpu().float() for each in gradients(found, leaves))]

    if backend == "mamba_ssm":
        on_device = ScanInputs(*(x.cuda() for x in inputs))
        case = (on_device.u.device, on_device.u.dtype, on_device.a.shape[1])
        if reason := obstacle(*case, is_packed=is_packed, has_start=False):
            pytest.skip(reason)
    wanted = results("cpu", "reference")
    assert_all_close(results("cuda", backend), wanted, TOLERANCE[dtype])
