"""A bundle on the Hugging Face hub, through its own package, which is an extra."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, UsageError, describe_error
from etude.core.progress import waiting
from etude.runs import bundle

_OURS = [f"{folder}/*" for folder in (bundle.POLICY, bundle.ONNX, bundle.EVALUATION)]
_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def check_upload(repo: str) -> None:
    """Refuse before anything is made what could not be uploaded later."""
    if not _NAME.fullmatch(repo):
        raise UsageError(f"'{repo}' is no repository of a hub: write --upload USER/NAME.")
    _hub()


def upload(path: Path, repo: str, private: bool, say: Callable[[str], None]) -> str:
    """Put the bundle at a path, a folder or a tar, into a repository; where it is then.

    Only files that its index names leave this machine, once each was found whole. Who uploads is
    known to `huggingface_hub`, by `hf auth login` or HF_TOKEN; HF_ENDPOINT names another hub.
    """
    hub = _hub()
    with (
        tempfile.TemporaryDirectory(prefix="etude-upload-") as scratch,
        bundle.opened(path, Path(scratch) / "bundle") as folder,
    ):
        examined = bundle.examine(folder)
        for name, wrong in examined.wrong.items():
            raise EtudeError(f"{path} is not whole and was not uploaded: {name} {wrong}.")
        names = [bundle.INDEX, *examined.index["files"]]
        say(f"Uploading {len(names)} files to {repo}.")
        try:
            with waiting(f"uploading to {repo}"):
                api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
                url = api.create_repo(repo, private=private, exist_ok=True)
                api.upload_folder(
                    repo_id=repo,
                    folder_path=folder,
                    allow_patterns=names,
                    delete_patterns=_OURS,  # an earlier bundle may have had more files
                    commit_message=f"{examined.index.get('name')}, bundled by Etude",
                )
        except Exception as error:  # its errors are many, and some are of other packages
            raise EtudeError(
                f"{path} could not be uploaded to {repo}: {describe_error(error)[:300]}. It stays "
                f"where it is: etude bundle {path} --upload {repo} tries again."
            ) from error
    return str(url)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            "An upload needs the package huggingface_hub: pip install 'etude[hub]'."
        ) from error
    return huggingface_hub
