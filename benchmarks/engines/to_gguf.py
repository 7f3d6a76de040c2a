"""Write a Llama checkpoint as a GGUF file, for llama.cpp.

    python -m benchmarks.engines.to_gguf MODEL TARGET --weights q4_0

Runs in an environment that has ``gguf`` and ``llama-cpp-python``; torch is not needed. The file
holds no vocabulary, as prompts are token ids. In float32 it is exact: after 48 random ids, m100
gave the same 32 greedy tokens as transformers in float32. The quantized forms are made from that
by llama.cpp's own quantizer, so they are what its users call Q4_0 and Q8_0: with a tied head, Q4_0
keeps the embedding in Q6_K.
"""

import argparse
import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

FILE_TYPES = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}
WEIGHTS = ("f32", *FILE_TYPES)


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 values of each tensor; all are stored in bfloat16.

    numpy has no bfloat16: its 16 bits are the upper half of a float32.
    """
    for file in sorted(checkpoint.glob("*.safetensors")):
        data = file.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} is {entry['dtype']}, not BF16")
            first, end = (begin + offset for offset in entry["data_offsets"])
            halves = np.frombuffer(data[first:end], np.uint16).astype(np.uint32)
            yield name, (halves << 16).view(np.float32).reshape(entry["shape"])


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection ``[heads * dim, inputs]`` as GGUF orders them.

    Rotary embeddings turn pairs of rows: row i of a head and row i + dim / 2 in the checkpoint,
    rows 2 i and 2 i + 1 in a GGUF file of a Llama.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_float32(checkpoint: Path, target: Path) -> None:
    """``checkpoint`` in float32 as the file ``target``."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"only Llama is converted, not {config['model_type']}")
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, values in read_tensors(checkpoint):
        if "q_proj" in name:
            values = interleave(values, heads)
        elif "k_proj" in name:
            values = interleave(values, config["num_key_value_heads"])
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, weights: str) -> None:
    """The float32 file ``source`` with quantized ``weights`` as the file ``target``."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = FILE_TYPES[weights]
    settings.nthread = len(os.sched_getaffinity(0))
    status = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(settings)
    )
    if status:
        raise RuntimeError(f"llama.cpp cannot quantize {source}")


def main() -> None:
    """Write under another name first: a file that is there is whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the checkpoint's folder")
    parser.add_argument("target", type=Path, help="the file to be written")
    parser.add_argument("--weights", choices=WEIGHTS, default="f32")
    arguments = parser.parse_args()
    plain = arguments.target.with_suffix(".f32")
    write_float32(arguments.model, plain)
    if arguments.weights == "f32":
        plain.replace(arguments.target)
        return
    part = arguments.target.with_suffix(".part")
    quantize(plain, part, arguments.weights)
    plain.unlink()
    part.replace(arguments.target)


if __name__ == "__main__":
    main()
