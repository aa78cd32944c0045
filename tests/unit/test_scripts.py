"""The shell scripts' own logic, without creating an environment or starting ranks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ["run_train.sh", "scripts/setup_env.sh", "scripts/test.sh", ".ci/run"]

# Stands in for python3 on PATH: has all dependencies, prints the arguments of every `-m` call.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = "-" ]; then cat >/dev/null; exit 0; fi
echo "call: $*"
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS PYTHONPATH=$PYTHONPATH"
if [ "$2" = "titanlite.preflight" ]; then exit "${PREFLIGHT_EXIT:-0}"; fi
"""
FAKE_NVIDIA_SMI = """#!/usr/bin/env bash
for i in 0 1 2 3; do echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: GPU-$i)"; done
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for the front of PATH with a stand-in python3 and, as on a machine without GPU, no nvidia-smi."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_tool(folder / "python3", FAKE_PYTHON)
    write_tool(folder / "nvidia-smi", "#!/usr/bin/env bash\nexit 9\n")
    return folder


def write_tool(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(*command: str, tools: Path | None = None, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    hidden = ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    if tools is not None:
        env["PATH"] = f"{tools}:{env['PATH']}"
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def train(tools: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return run(str(ROOT / "run_train.sh"), *arguments, tools=tools, **variables)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_executable_and_parses(script: str):
    assert os.access(ROOT / script, os.X_OK)
    result = run("bash", "-n", script)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script: str):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    result = run("shellcheck", "--external-sources", "--exclude=SC1091", "--severity=warning", script)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", ["run_train.sh", "scripts/test.sh"])
def test_help_needs_no_environment(script: str, tmp_path: Path):
    write_tool(tmp_path / "python3", "#!/usr/bin/env bash\nexit 1\n")
    result = run(str(ROOT / script), "--help", tools=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: ./")
    assert result.stderr == ""


def test_train_without_arguments_shows_the_usage(tools: Path):
    result = train(tools)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: ./run_train.sh")


@pytest.mark.parametrize("value", ["abc", "0", "-1", "2.5", "4 "])
def test_a_wrong_ngpu_is_a_clear_error(tools: Path, value: str):
    result = train(tools, "--config", "x.toml", NGPU=value)
    assert result.returncode == 2
    assert result.stderr == (
        f"run_train.sh: NGPU is '{value}', not a positive number. Set it to the ranks per machine.\n"
    )
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "two"}, "NNODES is 'two', not a positive number."),
        ({"NNODES": "2"}, "NODE_RANK is '' with NNODES=2. Set it to 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK is '2' with NNODES=2. Set it to 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR is not set, but NNODES is 2."),
    ],
)
def test_wrong_settings_of_many_machines_are_clear_errors(tools: Path, variables: dict[str, str], message: str):
    result = train(tools, "--config", "x.toml", **variables)
    assert result.returncode == 2
    assert message in result.stderr


def test_without_a_gpu_four_ranks_start_after_the_preflight(tools: Path):
    result = train(tools, "--config", "x.toml", "--job.description=two words")
    assert result.returncode == 0, result.stderr
    calls = [line for line in result.stdout.splitlines() if line.startswith("call: ")]
    arguments = "--config x.toml --job.description=two words"
    assert calls == [
        f"call: -m titanlite.preflight --world-size 4 {arguments}",
        f"call: -m titanlite.launch --standalone --nproc-per-node=4 -m titanlite.train {arguments}",
    ]
    assert f"OMP_NUM_THREADS=1 PYTHONPATH={ROOT}\n" in result.stdout
    assert result.stderr == ""


def test_settings_of_the_user_are_kept(tools: Path):
    result = train(tools, "--config", "x.toml", OMP_NUM_THREADS="3", PYTHONPATH="/elsewhere", NGPU="2")
    assert f"OMP_NUM_THREADS=3 PYTHONPATH={ROOT}:/elsewhere\n" in result.stdout
    assert "--nproc-per-node=2" in result.stdout


def test_a_failed_preflight_starts_no_rank_and_keeps_its_exit_code(tools: Path):
    result = train(tools, "--config", "x.toml", PREFLIGHT_EXIT="2")
    assert result.returncode == 2
    assert "titanlite.launch" not in result.stdout


@pytest.mark.parametrize(
    ("visible", "ranks"), [(None, 4), ("0,2", 2), ("3", 1), ("0,1,2,3,4,5", 4), ("", 4), ("-1", 4), ("0,-1,1", 1)]
)
def test_visible_gpus_are_counted(tools: Path, visible: str | None, ranks: int):
    write_tool(tools / "nvidia-smi", FAKE_NVIDIA_SMI)
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert f"--nproc-per-node={ranks} " in train(tools, "--config", "x.toml", **variables).stdout


def test_more_ranks_than_gpus_is_refused_unless_the_gpus_are_hidden(tools: Path):
    write_tool(tools / "nvidia-smi", FAKE_NVIDIA_SMI)
    result = train(tools, "--config", "x.toml", NGPU="8")
    assert result.returncode == 2
    assert "NGPU (8) is more than the visible GPUs (4)." in result.stderr
    assert train(tools, "--config", "x.toml", NGPU="8", CUDA_VISIBLE_DEVICES="").returncode == 0


def test_many_machines_share_one_rendezvous(tools: Path):
    result = train(tools, "--config", "x.toml", NNODES="2", NODE_RANK="1", MASTER_ADDR="host0", NGPU="8")
    assert "--world-size 16 " in result.stdout
    assert "--nnodes=2 --node-rank=1 --master-addr=host0 --master-port=29500 --nproc-per-node=8 " in result.stdout


def test_setup_uses_the_current_python_when_it_has_everything(tmp_path: Path):
    (tmp_path / "python3").symlink_to(sys.executable)
    # A link to a virtual environment's python loses the environment: name its packages.
    packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    result = run(str(ROOT / "scripts/setup_env.sh"), tools=tmp_path, PYTHONPATH=packages)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == str(tmp_path / "python3")


def copy_checkout(tmp_path: Path) -> Path:
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("scripts/setup_env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout / name)
    return checkout


def test_setup_without_a_usable_python_says_so(tmp_path: Path):
    checkout = copy_checkout(tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14", "python"):
        write_tool(tools / name, '#!/usr/bin/env bash\n[ "$1" = --version ] && echo "Python 3.9.2"\n')
    result = run(str(checkout / "scripts/setup_env.sh"), tools=tools)
    assert result.returncode == 1
    assert "titanlite: no Python 3.11 or newer: found Python 3.9.2 on PATH. Install Python 3.11" in result.stderr


def test_setup_shows_the_log_when_a_step_fails_and_starts_over_the_next_time(tmp_path: Path):
    checkout = copy_checkout(tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    # Old enough to lack the dependencies, new enough to be chosen; its venv module is missing.
    fake = '#!/usr/bin/env bash\ncase "$1" in -) exit 1 ;; -c) exit 0 ;; --version) echo "Python 3.11.0" ;;\n'
    fake += "*) echo 'No module named venv'; exit 1 ;; esac\n"
    write_tool(tools / "python3", fake)
    for _ in range(2):
        result = run(str(checkout / "scripts/setup_env.sh"), tools=tools)
        assert result.returncode == 1
        assert "creating .venv with Python 3.11.0 (first run" in result.stderr
        assert "this command failed: python3 -m venv" in result.stderr
        assert "    No module named venv" in result.stderr
        assert not (checkout / ".venv/stamp").exists()
