import pytest
import torch

from titanlite.features.diagnose.process import start_flight_recorder


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The variables of a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("os.environ", variables := {})
    return variables


def of_torch(environment):
    # pytest sets one, too
    return {name: value for name, value in environment.items() if name.startswith("TORCH")}


def test_dumps_go_into_the_folder_of_the_run(tmp_path, environment):
    start_flight_recorder(tmp_path / "run")
    folder = tmp_path / "run" / "flight_recorder"
    assert folder.is_dir()
    assert of_torch(environment) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/rank_",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_what_the_user_set_stays(tmp_path, environment, name):
    environment |= {name: "/elsewhere/", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    start_flight_recorder(tmp_path)
    assert environment.pop("TORCH_FR_BUFFER_SIZE") == "2000"
    assert of_torch(environment) == {name: "/elsewhere/", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
