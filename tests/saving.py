"""Save a model as a Hugging Face folder without a run; gather a tensor."""

from torch.distributed.tensor import DTensor

from titanlite.base.agree import on_first_rank
from titanlite.checkpoint.commit import commit_folder
from titanlite.checkpoint.description import describe_model
from titanlite.checkpoint.hf_model import format_of, index_of, master_files, warn_of_sidecar
from titanlite.data.tokenizer import describe_tokenizer, find_token_ids


def whole(tensor):
    """Return all values of a parameter or gradient, which on one rank may be no DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def model_files(plan, config, dtype, *, exact=False):
    """Lay out the files of the model of `config` in `plan`."""
    files = format_of(plan.model).files(plan, dtype)
    return files + master_files(plan, dtype) if exact else files


def save_hf_model(
    model,
    plan,
    tokenizer,
    folder,
    dtype,
    assets=None,
):
    """Write weights, config.json, generation_config.json and tokenizer into `folder`, as
    `save_pretrained` would.

    `folder` appears, or is replaced, in one step. Parameters are cast to `dtype`; buffers keep
    theirs. `tokenizer` is of transformers, or None to leave it out. What config.json and
    generation_config.json in `assets` say beyond the architecture is kept.

    Raises CheckpointError on all ranks: transformers refuses the configuration, or a rank could not
    write.

    Collectives: four small ones; every rank must call, and all ranks must see the same file system.
    """
    rest = {}

    def build():
        rest.update(describe_model(model.config, find_token_ids(tokenizer), dtype, assets))
        rest.update(describe_tokenizer(tokenizer))

    on_first_rank(build)
    files = model_files(plan, model.config, dtype)
    commit_folder(folder, files, rest | index_of(files))
    warn_of_sidecar(model.config, files)


def save_tokenizer(tokenizer, folder):
    """Write the files of a tokenizer as checkpoints have them into `folder`."""
    for name, content in describe_tokenizer(tokenizer).items():
        (folder / name).write_bytes(content)
