#!/usr/bin/env bash
# End the cluster: deploy/app/down.sh [deploy/cluster.yaml]
# `ray down` with the local provider only reaches the head; its workers would hold memory and GPUs for minutes.
# So: the deployment first, then Ray on each worker, then the head, then the head's saved state.
set -euo pipefail
config="${1:-deploy/cluster.yaml}"

ray exec "$config" '. ~/phasor/deploy/app/env.sh; phasor fleet stop --ray-address auto || true'
# Single quotes: all of it runs on the head, where the bootstrap files are.
# shellcheck disable=SC2016
ray exec "$config" '
  read_config="import os, yaml; c = yaml.safe_load(open(os.path.expanduser(\"~/ray_bootstrap_config.yaml\")))"
  user=$(python -c "$read_config; print(c[\"auth\"][\"ssh_user\"])")
  for ip in $(python -c "$read_config; print(*c[\"provider\"][\"worker_ips\"])"); do
    timeout 60 ssh -i ~/ray_bootstrap_key.pem -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
      -o ConnectTimeout=5 "$user@$ip" "bash -lic \"ray stop\"" </dev/null || echo "could not stop Ray on $ip"
  done'
# The state goes while the head can still be reached; its GCS only writes to files that it holds open.
ray exec "$config" 'ray stop; rm -rf ~/phasor-ray-gcs'
ray down -y "$config"
