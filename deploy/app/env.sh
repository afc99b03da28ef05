# Sourced by every login shell on every host (setup_commands put it into .bashrc). Plain sh.

# Where setup.sh installs Phasor; set it before this file is read to use an environment that is there already.
export PHASOR_VENV="${PHASOR_VENV:-$HOME/phasor-venv}"
case ":$PATH:" in
  *":$PHASOR_VENV/bin:"*) ;;
  *) export PATH="$PHASOR_VENV/bin:$PATH" ;;
esac

# Explicit on every process: one with and one without a token abort each other.
export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0

# How long workers wait for a head that restarts, before they end themselves. The head keeps its state on disk.
export RAY_gcs_rpc_server_reconnect_timeout_s=300
