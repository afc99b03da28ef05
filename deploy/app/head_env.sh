# Sourced on the head before `ray start`. Plain sh.
. "$HOME/phasor/deploy/app/env.sh"

# `ray up` sets 1 before this; with the local provider v2 counts the head as a worker and launches one too few.
export RAY_enable_autoscaler_v2=0

# The cluster's state survives a restart of the head, so workers go on and named actors come back.
# down.sh removes the folder: otherwise the next `ray up` would bring old actors back.
export RAY_gcs_storage=rocksdb
export RAY_gcs_storage_path="$HOME/phasor-ray-gcs"
mkdir -p "$RAY_gcs_storage_path"

# A silent host is dead after 9 s at worst; Ray's defaults take 65 s. (Requests do not wait for either: gRPC
# keepalive notices in 2 s.)
export RAY_health_check_initial_delay_ms=3000
export RAY_health_check_period_ms=1000
export RAY_health_check_timeout_ms=2000
export RAY_health_check_failure_threshold=3

# Ray would find its own address by asking the network; the file that `ray up` left here knows it.
PHASOR_HEAD_IP="$(python -c 'import os, yaml
print(yaml.safe_load(open(os.path.expanduser("~/ray_bootstrap_config.yaml")))["provider"]["head_ip"])')"
export PHASOR_HEAD_IP
