"""Kernels of the device that a plan is made for, and functions that stand in for those that read
values.
"""

import pytest
import torch

from titanlite.ops.kernels import find_stand_in, kernel_device, plan_for_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_plan_has_a_device_and_stand_ins_and_leaves_no_trace():
    with plan_for_device("cuda", {"outer": torch.add}):
        with (
            pytest.raises(RuntimeError, match="inside"),
            plan_for_device("cpu", {"inner": torch.mul}),
        ):
            assert find_stand_in("inner") is torch.mul and find_stand_in("outer") is None
            assert kernel_device(CUDA) == "cpu"
            raise RuntimeError("inside")
        assert find_stand_in("outer") is torch.add and kernel_device(CPU) == "cuda"
    assert find_stand_in("outer") is None and kernel_device(CPU) == "cpu"
