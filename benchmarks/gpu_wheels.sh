#!/usr/bin/env bash
# Fetch the wheels that a machine with PyTorch 2.11 or newer, NumPy and rich lacks for planning: python-mip, a HiGHS library,
# and what loads it. For Python 3.12 on x86-64 Linux by default. python-mip's other solver, CBC, is 191 MB and left out.
#
#     benchmarks/gpu_wheels.sh DIR [PYTHON_VERSION]
#
# Then, on that machine: python benchmarks/gpu_check.py --wheels DIR --out RESULTS
set -euo pipefail
directory=${1:?"usage: gpu_wheels.sh DIR [PYTHON_VERSION]"}
version=${2:-3.12}
most_mib=40
platforms=()
for glibc in 2_28 2_27 2_26 2_24 2_17; do
    platforms+=(--platform "manylinux_${glibc}_x86_64")
done
mkdir -p "$directory"
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$directory" \
    "mip>=2.0" "highsbox>=1.10" cffi pycparser
size_kib=$(cat "$directory"/*.whl | wc -c | awk '{ print int($1 / 1024) }')
if ((size_kib > most_mib * 1024)); then
    echo "The wheels take $((size_kib / 1024)) MiB, more than $most_mib MiB." >&2
    exit 1
fi
echo "$(find "$directory" -type f -name '*.whl' | wc -l) wheels, $((size_kib / 1024)) MiB, in $directory"
