#!/usr/bin/env bash
# Install the package as a stranger does, in an environment of its own, and run the tests marked `install` there.
#
#     .ci/test-install.sh latest    with the newest release of all that the package needs, without constraints.txt
#     .ci/test-install.sh oldest    with the oldest releases that pyproject.toml allows
#
# latest has the newest PyTorch too, and runs what may differ with that: the tests of tests/newest_torch.txt. pip's settings on a machine
# may hold releases back, so they are left out where pip finds packages without them. oldest has the PyTorch of .venv, linked: PyTorch's
# public builds bring gigabytes of CUDA along. HIREMATE_TORCH=2.14.1 installs that release for either, and PYTHON=python3.13 takes
# another interpreter for it. Further arguments go to pytest.
set -euo pipefail
which="${1:?latest or oldest}"
shift
is_linked=$([[ $which == oldest && -z ${HIREMATE_TORCH:-} ]] && echo yes || true)
if [[ $is_linked ]]; then
    unset PYTHON # what is linked is built for one interpreter
fi
source "$(dirname "$0")/setup.sh" demo
place="$PWD/.venv-$which"
own="$place/bin/python"

link_torch() {
    local from to path
    from="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    to="$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    for path in "$from"/{torch,torchgen,functorch,triton,nvidia,cuda} "$from"/{torch,triton,nvidia_*,cuda_*}-*.dist-info; do
        [[ ! -e $path ]] || ln -s "$path" "$to"
    done
}

# The lower bounds of the package's own requirements, as exact versions. transformers is none of them, and its Trainer asks for a newer
# Accelerate than it names.
lower_bounds() {
    sed -n '/^dependencies = \[/,/^\]/p' pyproject.toml | sed -n 's/^ *"\([a-z]*\)>=\([0-9.]*\).*/\1==\2/p' | grep -v '^torch=='
}

pip_install=("$own" -m pip install -qq --no-compile --disable-pip-version-check)
into_place() {
    if [[ $which == latest ]]; then
        env -u PIP_CONSTRAINT PIP_CONFIG_FILE=/dev/null "${pip_install[@]}" "$@" && return
        echo "pip finds no packages without this machine's settings: what follows is the newest that they allow"
    fi
    "${pip_install[@]}" "$@"
}

torch_told="${HIREMATE_TORCH:-${is_linked:+of .venv}}"
echo "Installing the $which releases into ${place##*/}, with torch ${torch_told:-in its newest release}"
rm -rf "$place"
if [[ $is_linked ]]; then
    "$python" -m venv "$place"
    link_torch
else
    "$(find_python)" -m venv "$place"
    into_place "torch${HIREMATE_TORCH:+==$HIREMATE_TORCH}"
fi
torch="torch==$("$own" -c 'from importlib.metadata import version; print(version("torch"))')"
if [[ $which == latest ]]; then
    versions=(transformers)
else
    mapfile -t versions < <(lower_bounds)
fi
mkdir "$place/source" # setuptools leaves files beside what it builds
cp -R hiremate_lightning callbacks pyproject.toml README.md LICENSE "$place/source"
into_place "$torch" "${versions[@]}" pytest pytest-xdist "$place/source"
"$own" -m pip check
"$own" -m pip list --format freeze | grep -E '^(torch|lightning|accelerate|mip|highsbox|cbcbox|numpy|packaging|psutil|rich|transformers)==' | tr '\n' ' '
echo

# The tests run beside the installed package, not beside the checkout's.
mkdir "$place/checkout"
cp -R tests benchmarks README.md pyproject.toml "$place/checkout"
cd "$place/checkout"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$place/bin/hiremate" doctor
tests=(-m install tests/project/test_install.py)
if [[ $which == latest ]]; then
    mapfile -t differing < <(grep -v '^#' tests/newest_torch.txt)
    tests=(-m "install or not (gpu or models or slow)" tests/project/test_install.py "${differing[@]}")
fi
# New releases warn of what will change one day. Our own warnings, of what does not work now, are errors.
exec "$own" -m pytest -n 2 -o filterwarnings=default -W error::hiremate_lightning.HiRemateWarning "${tests[@]}" "$@"
