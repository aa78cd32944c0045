"""Upload of a finished model to the Hugging Face hub."""

from pathlib import Path

from titanlite.base.errors import CheckpointError
from titanlite.base.log import logger
from titanlite.checkpoint.folder import OWN_FOLDER, how_to_finish
from titanlite.checkpoint.keys import SIDECAR_FILE


def push_to_hub(folder: Path, repository: str) -> None:
    """Upload the model in `folder`, without the training state, to `repository` ("owner/name"); made private if new.

    One process calls it, when the folder is complete. Token and address are those of the hub's own library.

    Raises:
        CheckpointError: the hub cannot be reached, refuses, or an upload fails. The folder is as it was.
    """
    if how := how_to_finish(folder):
        raise CheckpointError(
            f"checkpoint.push_to_hub: {folder} is no model yet. {how} Then upload it: hf upload {repository} OUT"
        )
    from huggingface_hub import HfApi  # half a second, and only this needs it

    logger.info("hub: uploading %s to %s", folder, repository)
    own = [f"{OWN_FOLDER}/{path.name}" for path in sorted((folder / OWN_FOLDER).glob("*")) if path.name != SIDECAR_FILE]
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            ignore_patterns=own,  # the sidecar stays: it is part of the model
            commit_message=f"{folder.name}, trained with titanlite",
        )
    except Exception as error:  # of the library, its HTTP client, or the system
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"checkpoint.push_to_hub: cannot upload to {repository}: {reason} The model is safe in {folder}; upload it "
            f"with: hf upload {repository} {folder} --exclude '{OWN_FOLDER}/*'"
        ) from error
    logger.info("hub: uploaded to https://huggingface.co/%s", repository)
