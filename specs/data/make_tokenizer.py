"""Trains the shipped tokenizer: byte-level BPE over `text.txt`, in the style of GPT-2 (its pre-tokeniser, no normaliser).

Owns: `tokenizer.json` beside it. The same text and the same version of `tokenizers` give the same bytes, so the file can
be checked against its source. Run it as a script to write the file again; nothing imports it at run time.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 7168
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HERE = Path(__file__).parent


def train(text: str) -> Tokenizer:
    """A tokenizer trained on `text`, one paragraph per line. All 256 bytes are in its alphabet, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer=trainer)
    return tokenizer


def main() -> int:
    tokenizer = train((HERE / "text.txt").read_text(encoding="utf-8"))
    tokenizer.save(str(HERE / "tokenizer.json"), pretty=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
