#!/bin/sh
# Wheels of what `make gpu-day` needs beside torch, for a machine with torch and no network: run in
# the root of the checkout with its environment active. Give folder, Python and platform of the
# wheels: sh tools/gpu_day/wheels.sh wheels 3.12 manylinux_2_28_x86_64
# There: pip install --no-index --no-deps --target SITE wheels/*.whl
set -eu
folder=${1:-wheels}
python=${2:-3.12}
platform=${3:-manylinux_2_28_x86_64}
# DeepSpeed comes as source alone, and its wheel asks for torch when it is made.
python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" \
    "$(python -m pip freeze | grep '^deepspeed==')"
versions=$(python -m pip freeze | grep -iE \
    '^(pydantic|pydantic_core|annotated-types|typing-inspection|hjson|msgpack|einops|psutil|PyYAML|tokenizers|safetensors|tqdm)==')
# shellcheck disable=SC2086 # a list of names
python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" \
    --implementation cp --platform "$platform" --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --dest "$folder" \
    $versions 'fla-core==0.6.0'
du -sm "$folder"
