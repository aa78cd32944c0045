"""What `training.deterministic` refuses, and how."""

import pytest
import torch

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.features.diagnose.process import explain_refusal, make_deterministic


def test_off_changes_nothing(monkeypatch):
    called = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", called.append)
    make_deterministic(JobConfig())
    assert called == []


def test_an_environment_that_forbids_it_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on: pytest.fail("refused before")
    )
    job = JobConfig()
    job.training.deterministic = True
    with pytest.raises(
        ConfigError,
        match=r"training\.deterministic: the environment has CUBLAS_WORKSPACE_CONFIG=:0:0",
    ):
        make_deterministic(job)


def test_an_operation_without_a_deterministic_form_is_named():
    error = RuntimeError(
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
        "operation, ..."
    )
    explained = explain_refusal(error)
    assert explained is not None and str(explained).startswith(
        "training.deterministic: cumsum_cuda_kernel has no deterministic form on this device. Set"
    )
    assert explain_refusal(RuntimeError("something else")) is None
