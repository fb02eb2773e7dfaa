"""Loads what `bireme checkpoint export` wrote, in one plain process, and shows that it is the trained model.

    bireme checkpoint export runs/first --out exported/model.safetensors
    python examples/load_exported.py exported/model.safetensors --text "def main():"

Prints the mean loss of the text, and the tokens that the model takes for the likeliest to follow.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open

from bireme.model import GPT, ModelConfig


def load(path: Path) -> tuple[GPT, str]:
    """The model, and the description of the tokens that it was trained on ("bytes", or a tokenizer's)."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = ModelConfig(**json.loads(metadata["config"]))  # the same as in the JSON file beside it
    model = GPT(config)
    if config.tied_embedding:  # stored once
        weights["output.weight"] = weights["token_embedding.weight"]
    model.load_state_dict(weights)
    return model.eval(), metadata["tokenizer"]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", default="def main():\n    return ", help="for a model of bytes")
    parser.add_argument("--tokens", help="for any model: token ids, as in 17,4,92, instead of a text")
    parser.add_argument("--next", type=int, default=24, help="tokens to add")
    arguments = parser.parse_args()

    model, tokenizer = load(arguments.file)
    vocabulary = None
    if tokenizer.startswith("tokenizers:"):  # a Hugging Face tokenizer; its file lies beside the model
        from tokenizers import Tokenizer

        vocabulary = Tokenizer.from_file(str(arguments.file.with_name("tokenizer.json")))
    if arguments.tokens is not None:
        if not all(each.strip().isdecimal() for each in arguments.tokens.split(",")):
            parser.error("--tokens are numbers with commas between them, as in 17,4,23")
        ids = [int(each) for each in arguments.tokens.split(",")]
    elif vocabulary is not None:
        ids = vocabulary.encode(arguments.text, add_special_tokens=False).ids
    elif tokenizer == "bytes":
        ids = list(arguments.text.encode())
    else:
        parser.error(f"the model's tokenizer is {tokenizer}: encode the text with it and give --tokens 17,4,23")
    context = model.config.sequence_length
    if len(ids) < 2:
        parser.error("a loss needs at least two tokens")
    tokens = torch.tensor([ids[: context + 1]])
    print(f"loss {model(tokens[:, :-1], tokens[:, 1:]).item():.6f}")
    for _ in range(arguments.next):
        ids.append(int(model(torch.tensor([ids[-context:]]))[0, -1].argmax()))
    added = ids[len(ids) - arguments.next :]
    print(f"next {added}")
    if vocabulary is not None:
        print(f"text {vocabulary.decode(added)!r}")
    elif tokenizer == "bytes" and max(added, default=0) < 256:
        print(f"text {bytes(added).decode(errors='replace')!r}")


if __name__ == "__main__":
    main()
