"""The shell scripts' own logic, without creating an environment or starting ranks."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = ["run_train.sh", "scripts/setup_env.sh", "scripts/test.sh", "scripts/clusters/slurm.sh", ".ci/run"]

# Stands in for python3 on PATH: has all dependencies, prints the arguments of every `-m` call.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = "-" ]; then cat >/dev/null; exit 0; fi
echo "gpus=$TITANLITE_GPUS."
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
    hidden += ("TITANLITE_GPUS",)
    prefixes = ("RDZV_", "SLURM_", "MAX_RESTARTS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    env = {name: value for name, value in kept.items() if name not in hidden} | variables
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
        ({"NNODES": "two"}, "NNODES is 'two', not a positive number or MIN:MAX."),
        ({"NNODES": "2"}, "NODE_RANK is '' with NNODES=2. Set it to 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK is '2' with NNODES=2. Set it to 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR is not set, but NNODES is 2."),
        ({"NNODES": "3:2"}, "NNODES is '3:2', not a positive number or MIN:MAX."),
        ({"NNODES": "1:2:3"}, "NNODES is '1:2:3', not a positive number or MIN:MAX."),
        ({"NNODES": "1:2"}, "NNODES is '1:2', but RDZV_ENDPOINT is not set. Set it to HOST:PORT."),
        ({"NNODES": "2", "MAX_RESTARTS": "1"}, "MAX_RESTARTS is 1 with NNODES=2, but RDZV_ENDPOINT is not set."),
        ({"MAX_RESTARTS": "often"}, "MAX_RESTARTS is 'often', not a number."),
        ({"NNODES": "2", "RDZV_ENDPOINT": "node0"}, "RDZV_ENDPOINT is 'node0'. Set it to HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": ":99"}, "RDZV_ENDPOINT is ':99'. Set it to HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "a:9", "NODE_RANK": "0"}, "NODE_RANK and RDZV_ENDPOINT are both set."),
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
    ("visible", "ranks"),
    [
        *((None, 4), ("0,2", 2), ("3", 1), ("0,1,2,3,4,5", 4), ("", 4), ("-1", 4), ("0,-1,1", 1), ("0, 2 ,3", 3)),
        ("GPU-1932f937-172c-4106-c12f-20bd9faed9f6,GPU-1b2c3d4e-1a2b-1c3d-9e8f-1234567890ab", 2),
    ],
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


def test_ranks_on_gpus_have_threads_and_settings_that_others_have_not(tools: Path):
    assert "gpus=.\n" in train(tools, "--config", "x.toml").stdout
    write_tool(tools / "nvidia-smi", FAKE_NVIDIA_SMI)
    write_tool(tools / "nproc", "#!/usr/bin/env bash\necho 12\n")
    with_gpus = train(tools, "--config", "x.toml").stdout
    assert "gpus=4.\n" in with_gpus and "OMP_NUM_THREADS=3 " in with_gpus
    assert "OMP_NUM_THREADS=8 " in train(tools, "--config", "x.toml", NGPU="1").stdout
    write_tool(tools / "nproc", "#!/usr/bin/env bash\necho 2\n")
    assert "OMP_NUM_THREADS=1 " in train(tools, "--config", "x.toml").stdout
    assert "OMP_NUM_THREADS=5 " in train(tools, "--config", "x.toml", OMP_NUM_THREADS="5").stdout


def test_many_machines_share_one_rendezvous(tools: Path):
    result = train(tools, "--config", "x.toml", NNODES="2", NODE_RANK="1", MASTER_ADDR="host0", NGPU="8")
    assert "--world-size 16 " in result.stdout
    assert "--nnodes=2 --node-rank=1 --master-addr=host0 --master-port=29500 --nproc-per-node=8 " in result.stdout


def test_machines_that_may_come_and_go_are_checked_for_every_number_of_them(tools: Path):
    variables = {"NNODES": "2:4", "RDZV_ENDPOINT": "host0:29400", "RDZV_CONF": "join_timeout=9", "MAX_RESTARTS": "3"}
    result = train(tools, "--config", "x.toml", NGPU="8", **variables)
    assert (result.returncode, result.stderr) == (0, "")
    assert "call: -m titanlite.preflight --world-size 32,24,16 --config x.toml\n" in result.stdout
    launch = "-m titanlite.launch --nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=host0:29400 --rdzv-id=titanlite"
    assert f"call: {launch} --rdzv-conf=join_timeout=9 --max-restarts=3 --nproc-per-node=8 " in result.stdout
    again = train(tools, "--config", "x.toml", NNODES="2", RDZV_ENDPOINT="[fd00::2]:29400", RDZV_ID="run7")
    assert "--world-size 8 " in again.stdout
    assert "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=[fd00::2]:29400 --rdzv-id=run7 --nproc" in again.stdout


def test_restarts_on_one_machine(tools: Path):
    result = train(tools, "--config", "x.toml", MAX_RESTARTS="2")
    assert "titanlite.launch --standalone --max-restarts=2 --nproc-per-node=4 " in result.stdout


def embedded_scripts() -> dict[str, str]:
    job = yaml.safe_load((ROOT / "scripts/clusters/pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    task = yaml.safe_load((ROOT / "scripts/clusters/skypilot.yaml").read_text())
    return {"kubernetes": container["command"][2], "sky setup": task["setup"], "sky run": task["run"]}


@pytest.mark.parametrize("name", ["kubernetes", "sky setup", "sky run"])
def test_scripts_inside_launch_files_parse(name: str, tmp_path: Path):
    script = tmp_path / "script.sh"
    script.write_text("#!/usr/bin/env bash\n" + embedded_scripts()[name])
    assert run("bash", "-n", str(script)).stderr == ""
    if shutil.which("shellcheck") is not None:
        result = run("shellcheck", "--severity=style", str(script))
        assert result.returncode == 0, result.stdout


def test_kubernetes_manifest(tools: Path):
    """Names that the training operator looks for, and the command as a pod would run it."""
    job = yaml.safe_load((ROOT / "scripts/clusters/pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Worker"], "elastic jobs have no master"
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    (port,) = container["ports"]
    assert port["name"] == "pytorchjob-port"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    operator = {
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_RDZV_ENDPOINT": f"titanlite-worker-0:{port['containerPort']}",
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    result = run(*container["command"], *container["args"], tools=tools, NGPU="8", **operator)
    assert (result.returncode, result.stderr) == (0, "")
    assert "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=titanlite-worker-0:23456 " in result.stdout
    assert f"--max-restarts=10 --nproc-per-node=8 -m titanlite.train {' '.join(container['args'])}\n" in result.stdout


def test_skypilot_file(tools: Path):
    task = yaml.safe_load((ROOT / "scripts/clusters/skypilot.yaml").read_text())
    known = {"name", "num_nodes", "resources", "workdir", "envs", "file_mounts", "volumes", "setup", "run"}
    assert set(task) == known
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    node |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "sky-7"}
    variables = {**task["envs"], "ARGS": "--training.steps=9 --optimizer.lr=1e-4"}
    result = run("bash", "-c", task["run"], tools=tools, **node, **variables)
    assert (result.returncode, result.stderr) == (0, "")
    assert "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29400 --rdzv-id=sky-7 " in result.stdout
    assert result.stdout.rstrip().splitlines()[-2].endswith("--training.steps=9 --optimizer.lr=1e-4")


@pytest.mark.parametrize("where", ["outside of a job", "in another folder"])
def test_slurm_script_started_wrongly(where: str, tools: Path, tmp_path: Path):
    """tests/functional/test_many_nodes.py trains with it."""
    variables = {} if where == "outside of a job" else {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    result = run(str(ROOT / "scripts/clusters/slurm.sh"), "--config", "x.toml", tools=tools, **variables)
    assert result.returncode == 2 and result.stdout == ""
    expected = "not in a SLURM job" if where == "outside of a job" else f"no run_train.sh in {tmp_path}"
    assert result.stderr.startswith(f"slurm.sh: {expected}")


# Gets the signal before the time limit as soon as it runs, and does on SIGTERM what the test says.
FAKE_SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$FAKE_FOLDER/srun.log"
save() {
    mkdir -p "$FAKE_FOLDER/run/checkpoint/step-$1/titanlite"
    touch "$FAKE_FOLDER/run/checkpoint/step-$1/titanlite/manifest.json"
}
trap 'eval "$ON_SIGTERM"; exit 0' TERM
kill -USR1 "$PPID"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
exit 9
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then
    echo node0
    while [ -e "$FAKE_FOLDER/hold" ]; do touch "$FAKE_FOLDER/holding"; sleep 0.05; done
else
    echo "$*" >>"$FAKE_FOLDER/scontrol.log"
fi
"""
WITHOUT_PROGRESS = (
    "slurm.sh: the signal before the time limit came before a first checkpoint; the job is not put back into the "
    "queue. Raise --time, or let the signal come later: sbatch --signal=B:USR1@SECONDS ...\n"
)


def start_slurm_job(folder: Path, *overrides: str, **variables: str) -> subprocess.Popen[str]:
    tools = folder / "bin"
    tools.mkdir()
    write_tool(tools / "srun", FAKE_SRUN)
    write_tool(tools / "scontrol", FAKE_SCONTROL)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RDZV_", "SLURM_", "NGPU"))}
    env = kept | {"PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}", "FAKE_FOLDER": str(folder)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"SLURM_SUBMIT_DIR": str(ROOT), "ON_SIGTERM": ":"} | variables
    command = [str(ROOT / "scripts/clusters/slurm.sh"), "--config", str(ROOT / "configs/qwen3_moe.toml"), *overrides]
    command.append(f"--job.dump_folder={folder / 'run'}")
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def make_old_checkpoint(folder: Path, step: int) -> None:
    manifest = folder / f"run/checkpoint/step-{step}/titanlite/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    os.utime(manifest, (time.time() - 3600,) * 2)


@pytest.mark.parametrize(
    ("old_step", "on_sigterm", "code", "requeued"),
    [
        (None, "save 3", 0, True),
        (100, "save 103", 0, True),
        (100, "save 60", 0, True),  # the run went back before it went on
        (None, ":", 2, False),
        (100, ":", 2, False),
        (100, "mv $FAKE_FOLDER/run/checkpoint/step-100{,.damaged}", 2, False),
        (None, "exit 143", 143, False),  # the launchers were still waiting for each other
        (None, "save 3; exit 1", 1, False),
    ],
)
def test_a_slurm_job_is_put_back_if_it_saved_something(
    tmp_path: Path, old_step: int | None, on_sigterm: str, code: int, requeued: bool
):
    if old_step is not None:
        make_old_checkpoint(tmp_path, old_step)
    job = start_slurm_job(tmp_path, ON_SIGTERM=on_sigterm)
    out, err = job.communicate(timeout=60)
    assert job.returncode == code, (out, err)
    assert out.count("slurm.sh: the time limit is near: asking the run to save and end\n") == 1
    assert (tmp_path / "scontrol.log").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    said = f"slurm.sh: the run ended with exit code {code}\n" if "exit" in on_sigterm else ""
    assert err == said + ("" if "save" in on_sigterm else WITHOUT_PROGRESS)


def test_a_slurm_job_that_gets_the_signal_before_it_has_begun_says_so(tmp_path: Path):
    (tmp_path / "hold").touch()
    job = start_slurm_job(tmp_path)
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "holding").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
    finally:
        (tmp_path / "hold").unlink()
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (2, WITHOUT_PROGRESS)
    assert not (tmp_path / "srun.log").exists() and not (tmp_path / "scontrol.log").exists()


@pytest.mark.parametrize("cores", [None, "64"])
def test_srun_gives_each_launcher_the_cores_of_the_job(tmp_path: Path, cores: str | None):
    job = start_slurm_job(tmp_path, **({} if cores is None else {"SLURM_CPUS_PER_TASK": cores}))
    job.communicate(timeout=60)
    given = (tmp_path / "srun.log").read_text().splitlines()
    options = [text for text in given if text.startswith("--cpus-per-task")]
    assert options == ([] if cores is None else ["--cpus-per-task=64"])
    assert given.index(str(ROOT / "run_train.sh")) == len(given) - 4 and "" not in given


def test_a_slurm_job_with_a_wrong_setting_starts_nothing(tmp_path: Path):
    job = start_slurm_job(tmp_path, "--training.step=5")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert err.startswith("titanlite: error: ") and "did you mean 'training.steps'" in err and "Traceback" not in err
    assert not (tmp_path / "srun.log").exists()


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
