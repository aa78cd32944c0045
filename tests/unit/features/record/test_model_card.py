"""The model card: a header that the hub reads, and nothing that depends on time or place."""

from huggingface_hub import ModelCard

from titanlite.checkpoint import Progress
from titanlite.config import JobConfig
from titanlite.config.data import DataSection
from titanlite.config.schema import CheckpointSection
from titanlite.features.record.publish import render_model_card
from titanlite.metrics.point import Results

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"
HUB = f"/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{COMMIT}"


def make_card(**sections):
    job = JobConfig(**sections)
    results = Results(job.validation, "none")
    results.add_evaluation(0, "exact_match", 0.0)
    results.add_validation(10, 2.25)
    results.add_validation(20, 2.5)
    results.add_evaluation(20, "exact_match", 0.9375)
    return render_model_card(
        job,
        family="qwen3_moe",
        num_parameters=1_234_567,
        progress=Progress(
            20, 160, "960 examples, seed 42", 4, {"torch": "2.13.0", "titanlite": "0.1"}
        ),
        results=results,
    )


def test_header_is_what_the_hub_reads():
    card = ModelCard(
        make_card(
            checkpoint=CheckpointSection(initial_load_path=HUB),
            data=DataSection(path="openai/gsm8k@main"),
        )
    )
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.base_model == "Qwen/Qwen3-0.6B" and card.data.datasets == ["openai/gsm8k"]
    assert card.data.tags == ["titanlite"]
    assert (
        "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B) (revision `c1899de289a0`)"
        in card.text
    )


def test_a_local_base_model_is_no_hub_id():
    card = ModelCard(
        make_card(checkpoint=CheckpointSection(initial_load_path="/secret/place/model"))
    )
    assert card.data.base_model is None
    assert "trained from `model`" in card.text and "secret" not in str(card)


def test_license_of_the_base_model_is_metadata(tmp_path):
    """Nothing else of the base model's header comes along, and a broken one costs the license
    only.
    """
    readme = (
        "---\nlicense: other\nlicense_name: 'qwen-research'\ntags:\n- license: mit\nname: "
        "x\n---\nlicense: gpl\n"
    )
    (tmp_path / "README.md").write_text(readme)
    section = CheckpointSection(initial_load_path=str(tmp_path))
    card = ModelCard(make_card(checkpoint=section))
    assert (card.data.license, card.data.license_name) == ("other", "qwen-research")
    assert card.data.tags == ["titanlite"] and "name: x" not in str(card)
    for broken in (b"\xff---\nlicense: mit\n---\n", b"---\nlicense: mit", b"no header"):
        (tmp_path / "README.md").write_bytes(broken)
        assert ModelCard(make_card(checkpoint=section)).data.license is None
