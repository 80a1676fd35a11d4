#!/usr/bin/env bash
# Make the environment .venv, or leave it alone if it is up to date. Other scripts source this file.
#
#     source .ci/setup.sh all      all that tests, checks, documents and examples need
#     source .ci/setup.sh demo     the package alone, with what it needs
#
# torch goes first, alone and pinned: whatever is installed after it then finds it there, and asks for no other build.
# The versions are those of constraints.txt. PYTHON=... chooses another interpreter for a new environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# What is imported is compiled once. Without this each process of a test would compile PyTorch again, for 7 s, where a machine's settings say so.
unset PYTHONDONTWRITEBYTECODE
python=.venv/bin/python
stamp=.venv/.installed
demo_stamp=.venv/.installed-demo

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
        if "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "No Python 3.10 or newer with the venv module was found. Install one, or name it: PYTHON=/path/to/python" >&2
    return 1
}

# Install, and name what is downloaded. Python compiles what it imports when it first does, which is a small part of it all.
install() {
    local said
    said="$(mktemp)"
    if ! "$python" -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt "$@" 2>&1 |
        tee "$said" | sed -u -n -e 's/^ *Downloading \([^ ]*\) \(([0-9.]* [MG]B)\)/    downloading \1 \2/p' \
        -e 's/^Installing collected.*/    unpacking/p'; then
        cat "$said" >&2
        rm -f "$said"
        return 1
    fi
    rm -f "$said"
}

# timm brings torchvision along. Where that is built for another torch than the one here (its public builds need CUDA's), it fails to
# import, and everything that looks for it fails too, Lightning among them. Nothing but tests of timm wants it.
drop_unusable_torchvision() {
    if ! "$python" -c 'import torchvision' 2>/dev/null; then
        echo "  torchvision does not work with this build of torch: left out"
        "$python" -m pip uninstall -qq --yes torchvision
    fi
}

make_environment() {
    local name
    if [[ ! -x $python ]] || ! "$python" -m pip --version >/dev/null 2>&1; then
        name="$(find_python)"
        echo "Setting up .venv with $("$name" --version), once"
        rm -rf .venv
        "$name" -m venv .venv
    else
        echo "Updating .venv"
    fi
}

is_stamped() {
    [[ -x $python && -f $1 && $(<"$1") == "$wanted" ]]
}

set_up() {
    # The place belongs to it too: an environment that was moved still points to where it was made.
    local wanted
    wanted="$(cat pyproject.toml constraints.txt .ci/setup.sh | cksum) $PWD"
    if is_stamped "$stamp" || { [[ $1 == demo ]] && is_stamped "$demo_stamp"; }; then
        return
    fi
    if ! is_stamped "$demo_stamp"; then
        rm -f "$stamp" "$demo_stamp"
        make_environment
        echo "  torch, pinned"
        install torch
        echo "  hiremate-lightning and what it needs"
        install --editable .
        echo "$wanted" >"$demo_stamp"
    fi
    if [[ $1 == all ]]; then
        echo "  what tests, checks and documents need"
        install --editable ".[dev,models,examples,docs]"
        drop_unusable_torchvision
        echo "$wanted" >"$stamp"
    fi
    echo "  done in $SECONDS s"
}

set_up "$1"
