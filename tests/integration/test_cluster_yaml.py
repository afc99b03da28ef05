"""deploy/cluster.yaml: valid for Ray's own validator, and free of the traps that were measured."""

import copy
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from phasor.deploy.cli import build_app

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "deploy" / "app"


@pytest.fixture(scope="module")
def cluster() -> dict:
    return yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text(encoding="utf-8"))


def prepared(cluster: dict) -> dict:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(copy.deepcopy(cluster))
    validate_config(config)
    return config


def test_rays_validator_accepts_it_with_all_workers(cluster):
    (node_type,) = prepared(cluster)["available_node_types"].values()
    num_hosts = len(cluster["provider"]["worker_ips"])
    assert (node_type["min_workers"], node_type["max_workers"]) == (num_hosts, num_hosts)


def test_rays_validator_would_notice_a_misspelt_key(cluster):
    broken = {**cluster, "setup_comands": []}
    with pytest.raises(Exception, match="setup_comands"):
        prepared(broken)


def test_the_head_starts_ray_in_so_many_words_without_autoscaler_v2(cluster):
    (start,) = [command for command in cluster["head_start_ray_commands"] if "ray start" in command]
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start
    assert start.index("RAY_enable_autoscaler_v2=0") < start.index("ray start")
    assert "--node-ip-address=$PHASOR_HEAD_IP" in start
    assert "PHASOR_HEAD_IP" in (APP / "head_env.sh").read_text(encoding="utf-8")


def test_a_live_raylet_is_kept_on_workers(cluster):
    for command in cluster["worker_start_ray_commands"]:
        assert "pgrep -x raylet ||" in command


def test_a_file_limit_that_cannot_be_raised_does_not_stop_the_start(cluster):
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    limits = [command for command in commands if "ulimit" in command]
    assert limits
    assert all("ulimit -n 65536 || true;" in command for command in limits)


def test_path_token_mode_and_usage_statistics_come_from_bashrc(cluster):
    assert any("app/env.sh" in command and ".bashrc" in command for command in cluster["setup_commands"])
    shown = subprocess.run(
        ["sh", "-c", f". {APP}/env.sh; . {APP}/env.sh; echo $RAY_AUTH_MODE $RAY_USAGE_STATS_ENABLED $PATH"],
        env={"HOME": "/home/x", "PATH": "/bin:/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    assert shown.stdout.strip() == "token 0 /home/x/phasor-venv/bin:/bin:/usr/bin"
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_every_mounted_path_exists_and_every_source_root_is_mounted(cluster):
    local = [path for path in cluster["file_mounts"].values() if not path.startswith("~")]
    assert all((ROOT / path).exists() for path in local)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert set(build["dev-mode-dirs"]) <= set(local)


def test_the_command_that_serves_is_one_that_our_command_line_takes(cluster):
    command = typer.main.get_command(build_app())
    (serve,) = [c for c in cluster["head_start_ray_commands"] if "phasor serve" in c]
    words = serve.split("phasor serve", 1)[1].split()
    context = command.commands["serve"].make_context("serve", words)
    assert context.params["detach"]
    assert (context.params["host"], context.params["worker_host"]) == ("0.0.0.0", "auto")


@pytest.mark.parametrize("script", sorted(path.name for path in APP.glob("*.sh")))
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", str(APP / script)], check=True, timeout=10)
