"""From the name that a user gives to a model on this disk: an alias, a path, or a Hugging Face repository.

Loads no torch: the server's process resolves the same name for its tokenizer.
"""

import re
from pathlib import Path

from biphase.errors import BadInput
from biphase.models import locate

REPOSITORY = re.compile(r"^[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?$")
"""``org/name``, or ``org/name/file.gguf`` for one file of it."""


def resolve(name: str) -> Path:
    """A GGUF file, a folder with config.json, or a config.json. ``BadInput`` says what was looked for, and where."""
    if REPOSITORY.match(name) and not Path(name).expanduser().exists():
        return _download(name)
    return locate(name)


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    repository, file = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    try:
        if file:
            return Path(hf_hub_download(repository, file))
        return Path(snapshot_download(repository, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except RepositoryNotFoundError:
        what = "is neither a path here nor a repository on the Hugging Face hub (a gated one needs: hf auth login)"
    except LocalEntryNotFoundError:
        what = "is no path here, is not in the Hugging Face cache, and the hub cannot be reached from this machine"
    except (HfHubHTTPError, OSError) as error:
        what = f"is no path here and the Hugging Face hub did not give it: {str(error).splitlines()[0]}"
    raise BadInput(f"{name} {what}; give a GGUF file, a folder with config.json and safetensors, or smollm2-135m")
