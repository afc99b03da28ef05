#!/usr/bin/env bash
# Install Phasor from ~/phasor into $PHASOR_VENV. Runs on every host at every `ray up`; does nothing when
# pyproject.toml is the one that was installed (the install is editable: changed sources need none).
set -euo pipefail

. "$HOME/phasor/deploy/app/env.sh"
stamp="$PHASOR_VENV/.phasor-installed"
wanted="$(sha256sum "$HOME/phasor/pyproject.toml" | cut -d' ' -f1)"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  echo "phasor is installed in $PHASOR_VENV"
  exit 0
fi
if [ ! -x "$PHASOR_VENV/bin/python" ]; then
  "${PHASOR_PYTHON:-python3.11}" -m venv "$PHASOR_VENV"
fi
# PHASOR_PIP_ARGS: e.g. --index-url of your mirror, or of a torch build for your GPUs.
# shellcheck disable=SC2086
"$PHASOR_VENV/bin/python" -m pip install --quiet ${PHASOR_PIP_ARGS:-} --editable "$HOME/phasor[fetch]"
"$PHASOR_VENV/bin/phasor" --help > /dev/null
echo "$wanted" > "$stamp"
