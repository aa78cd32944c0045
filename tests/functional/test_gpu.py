"""What only a CUDA device can show. Skips itself without one."""

import pytest
import torch
import torch.distributed as dist

from titanlite.config.parallelism import Degrees
from titanlite.generate import Sampling, generate
from titanlite.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def losses_of(checked):
    """`losses_of(*overrides)`: the losses of 5 steps on one GPU, in this process (forked ranks cannot use CUDA)."""

    def run(*overrides: str) -> list[float]:
        configuration = checked(Degrees(), *overrides)
        trainer = Trainer(configuration.job, configuration.model_config, configuration.degrees)
        losses = []
        for step in range(5):
            batches = [batch.to(trainer.device) for batch in trainer.loader.micro_batches(step)]
            losses.append(trainer.train_step(batches).loss.item())
        trainer.metrics.close()
        dist.destroy_process_group()
        return losses

    return run


def test_bfloat16_follows_float32(losses_of):
    exact = losses_of("--training.mixed_precision_param=float32")
    # bfloat16 rounds activations and weights to 8 bits: 0.4 % each, averaged over thousands of tokens.
    assert losses_of("--training.mixed_precision_param=bfloat16") == pytest.approx(exact, rel=1e-2)


def test_cpu_offload_changes_nothing(losses_of):
    kept = losses_of("--training.mixed_precision_param=float32")
    offloaded = losses_of("--training.mixed_precision_param=float32", "--training.enable_cpu_offload=true")
    assert offloaded == pytest.approx(kept, rel=1e-5)  # AdamW on the CPU rounds in another order


def test_flex_attention_equals_sdpa(losses_of):
    sdpa = losses_of("--training.mixed_precision_param=float32")
    flex = losses_of("--training.mixed_precision_param=float32", "--model.attention_backend=flex")
    assert flex == pytest.approx(sdpa, rel=1e-3)  # flex may use TF32 for float32 inputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generation_with_a_cache_equals_generation_without(checked, dtype):
    """Greedy. In bfloat16 a random model's logits are near ties, so only the first tokens are compared there."""
    configuration = checked(Degrees(), f"--training.mixed_precision_param={dtype}")
    trainer = Trainer(configuration.job, configuration.model_config, configuration.degrees)

    class Plain(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(tokens)

    prompts = [[5, 6, 7], [8], list(range(20))]
    options = {"max_new_tokens": 8 if dtype == "float32" else 1, "device": trainer.device, "dims": trainer.dims}
    cached = generate(trainer.model, prompts, **options)
    assert cached == generate(Plain(trainer.model), prompts, **options)
    drawn = generate(trainer.model, prompts, **options, sampling=Sampling(temperature=1.0, top_k=20, top_p=0.9))
    assert all(continuation.tokens for continuation in drawn)
    trainer.metrics.close()
    dist.destroy_process_group()
