"""The shell scripts' own logic, without creating an environment or starting ranks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SLURM = "scripts/clusters/slurm.sh"
SCRIPTS = ["run_train.sh", "scripts/setup_env.sh", "scripts/test.sh", SLURM, ".ci/run"]

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
HIDDEN = (
    "NGPU",
    "NNODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
)
HIDDEN += ("TITANLITE_GPUS", "RDZV_", "SLURM_", "MAX_RESTARTS")


@pytest.fixture
def tools(tmp_path):
    """A folder for the front of PATH with a stand-in python3 and, as on a machine without GPU, no
    nvidia-smi.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    write_tool(folder / "python3", FAKE_PYTHON)
    write_tool(folder / "nvidia-smi", "#!/usr/bin/env bash\nexit 9\n")
    return folder


def write_tool(path, text):
    path.write_text(text)
    path.chmod(0o755)


def run(*command, tools=None, **variables):
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)
    } | variables
    if tools is not None:
        env["PATH"] = f"{tools}:{env['PATH']}"
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def train(tools, **variables):
    return run(ROOT / "run_train.sh", "--config", "x.toml", tools=tools, **variables)


def embedded_scripts():
    job = yaml.safe_load((ROOT / "scripts/clusters/pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    task = yaml.safe_load((ROOT / "scripts/clusters/skypilot.yaml").read_text())
    return {"kubernetes": container["command"][2], "setup": task["setup"], "run": task["run"]}


def test_scripts_are_executable_and_pass_shellcheck(tmp_path):
    assert [script for script in SCRIPTS if not os.access(ROOT / script, os.X_OK)] == []
    for name, text in embedded_scripts().items():
        write_tool(tmp_path / name, "#!/usr/bin/env bash\n" + text)
    for script in (*SCRIPTS, *tmp_path.iterdir()):
        result = run("bash", "-n", script)
        assert (result.returncode, result.stderr) == (0, "")
        if shutil.which("shellcheck") is not None:
            result = run(
                "shellcheck", "--external-sources", "--exclude=SC1091", "--severity=warning", script
            )
            assert result.returncode == 0, result.stdout


def test_wrong_variables_are_clear_errors(tools):
    for variables, message in {
        "NGPU=2.5": "NGPU is '2.5', not a positive number.",
        "NNODES=2 NODE_RANK=2": "NODE_RANK is '2' with NNODES=2. Set it to 0 to 1",
        "NNODES=1:2": "NNODES is '1:2', but RDZV_ENDPOINT is not set.",
        "NNODES=2 RDZV_ENDPOINT=:99": "RDZV_ENDPOINT is ':99'. Set it to HOST:PORT",
        "NNODES=2 RDZV_ENDPOINT=a:9 NODE_RANK=0": "NODE_RANK and RDZV_ENDPOINT are both set.",
    }.items():
        result = train(tools, **dict(word.split("=") for word in variables.split()))
        assert (result.returncode, result.stdout) == (2, "") and message in result.stderr, variables


def test_without_a_gpu_four_ranks_start_after_the_preflight(tools):
    result = run(
        ROOT / "run_train.sh", "--config", "x.toml", "--job.description=two words", tools=tools
    )
    assert (result.returncode, result.stderr) == (0, "")
    arguments = "--config x.toml --job.description=two words"
    assert [line for line in result.stdout.splitlines() if line.startswith("call: ")] == [
        f"call: -m titanlite.preflight --world-size 4 {arguments}",
        f"call: -m titanlite.launch --standalone --nproc-per-node=4 -m titanlite.rank {arguments}",
    ]
    assert "gpus=.\n" in result.stdout and f"OMP_NUM_THREADS=1 PYTHONPATH={ROOT}\n" in result.stdout
    kept = train(tools, OMP_NUM_THREADS="3", PYTHONPATH="/elsewhere", NGPU="2").stdout
    assert (
        f"OMP_NUM_THREADS=3 PYTHONPATH={ROOT}:/elsewhere\n" in kept and "--nproc-per-node=2" in kept
    )
    failed = train(tools, PREFLIGHT_EXIT="2")
    assert failed.returncode == 2 and "titanlite.launch" not in failed.stdout


def test_visible_gpus_are_counted(tools):
    write_tool(tools / "nvidia-smi", FAKE_NVIDIA_SMI)
    write_tool(tools / "nproc", "#!/usr/bin/env bash\necho 12\n")
    alone = train(tools).stdout
    assert "gpus=4.\n" in alone and "OMP_NUM_THREADS=3 " in alone and "--nproc-per-node=4 " in alone
    ids = "GPU-1932f937-172c-4106-c12f-20bd9faed9f6,GPU-1b2c3d4e-1a2b-1c3d-9e8f-1234567890ab"
    for visible, ranks in {"": 4, "0,-1,1": 1, ids: 2}.items():
        assert f"--nproc-per-node={ranks} " in train(tools, CUDA_VISIBLE_DEVICES=visible).stdout, (
            visible
        )
    result = train(tools, NGPU="8")
    assert result.returncode == 2 and "NGPU (8) is more than the visible GPUs (4)." in result.stderr
    assert train(tools, NGPU="8", CUDA_VISIBLE_DEVICES="").returncode == 0


def test_kubernetes_manifest(tools):
    """Names that the training operator looks for, and the command as a pod would run it."""
    job = yaml.safe_load((ROOT / "scripts/clusters/pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Worker"], "elastic jobs have no master"
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert (container["name"], port["name"]) == ("pytorch", "pytorchjob-port")
    nodes = f"{policy['minReplicas']}:{policy['maxReplicas']}"
    operator = {
        "PET_NNODES": nodes,
        "PET_RDZV_ENDPOINT": f"titanlite-worker-0:{port['containerPort']}",
    }
    operator |= {"PET_RDZV_ID": policy["rdzvId"], "PET_MAX_RESTARTS": str(policy["maxRestarts"])}
    result = run(*container["command"], *container["args"], tools=tools, NGPU="8", **operator)
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=titanlite-worker-0:23456" in result.stdout
    )
    assert "--max-restarts=10 --nproc-per-node=8 -m titanlite.rank" in result.stdout


# Gets the signal before the time limit as soon as it runs, and does on SIGTERM what the test says.
FAKE_SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$FOLDER/srun.log"
env >"$FOLDER/environment"
save() { mkdir -p "$SAVED"; touch "$SAVED/manifest.json"; }
trap 'eval "$ON_SIGTERM"; exit 0' TERM
kill -USR1 "$PPID"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
exit 9
"""
FAKE_SCONTROL = (
    '#!/usr/bin/env bash\n[ "$1" = show ] && echo node0 || echo "$*" >>"$FOLDER/scontrol.log"\n'
)


@pytest.mark.parametrize(("on_sigterm", "code"), [("save", 0), (":", 2)])
def test_a_slurm_job_is_put_back_if_it_saved_something(tmp_path, on_sigterm, code):
    """tests/functional/test_many_nodes.py trains with the variables that it sets."""
    tools = tmp_path / "bin"
    tools.mkdir()
    write_tool(tools / "srun", FAKE_SRUN)
    write_tool(tools / "scontrol", FAKE_SCONTROL)
    (tools / "python3").symlink_to(sys.executable)
    old = tmp_path / "run/checkpoint/step-1/titanlite/manifest.json"
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, (0, 0))
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
        "NODE_RANK": "7",  # of an interactive session
    }
    job |= {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "ON_SIGTERM": on_sigterm,
        "FOLDER": str(tmp_path),
        # A link to a virtual environment's python loses the environment: name its packages.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith("site-packages")),
    }
    job["SAVED"] = str(tmp_path / "run/checkpoint/step-3/titanlite")
    arguments = [
        "--config",
        str(ROOT / "configs/qwen3_moe.toml"),
        f"--job.dump_folder={tmp_path / 'run'}",
    ]
    result = run(ROOT / SLURM, *arguments, tools=tools, **job)
    assert result.returncode == code, (result.stdout, result.stderr)
    assert (tmp_path / "scontrol.log").exists() == (code == 0)
    assert ("nothing was saved before the time limit" in result.stderr) == (code == 2)
    given = (tmp_path / "srun.log").read_text().splitlines()
    (tmp_path / "srun.log").unlink()
    variables = (tmp_path / "environment").read_text().splitlines()
    assert {"NNODES=2", "RDZV_ENDPOINT=node0:20007", "RDZV_ID=slurm-7-0"} <= set(variables)
    assert "NODE_RANK=7" not in variables
    wrong = run(ROOT / SLURM, *arguments, "--training.step=5", tools=tools, **job)
    assert wrong.returncode == 2 and "did you mean 'training.steps'" in wrong.stderr
    assert not (tmp_path / "srun.log").exists()
    assert given[-4:] == [str(ROOT / "run_train.sh"), *arguments] and "--cpus-per-task=64" in given
