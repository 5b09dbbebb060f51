#!/usr/bin/env python3
"""Writes the golden data of tests/unit/test_tokenizer.c into tests/reference/tokenizer/.

  lines.json             the texts, one list of strings
  NAME/tokenizer.json    small tokenizers trained here, one per way of cutting text
  NAME.ids               what Hugging Face `tokenizers` makes of each text: ids, and after a '|' the
                         ids with special tokens recognised, where these are others

`tiny` is the checkpoint's own tokenizer. To compare others: --check FOLDER prints the ids of all
lines for the tokenizer.json in FOLDER, in the same format. Needs: pip install tokenizers.
"""
import argparse
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "tokenizer"
TINY = HERE.parent.parent / "models" / "fathom-tiny" / "tokenizer.json"

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

WORDS = """the a of and to in lamp river fathom sounding lead line depth water keel anchor harbour
tide shoal chart compass mast sail rope winch storm calm north south reef lantern captain pilot
weather quiet deep slow Under Over Between Before After measure counting thirteen forty-two naïve
façade Ångström señor""".split()

SCRIPTS = [
    "深い海の底に静かな光がある。", "ランプを下げて水深を測る", "水深は十二尋です、注意してください！", "깊은 바다의 밑바닥을 재다",
    "قاس البحّار عمق الماء بحبل طويل", "המלח מדד את עומק המים", "Глубина реки не меняется.",
    "Το βάθος του νερού", "नाविक ने पानी की गहराई नापी", "ชาวประมงวัดความลึกของน้ำ",
    "Độ sâu của nước thay đổi", "ความลึก ๑๒๓ เมตร", "፩፪፫ ጥልቀት", "ꦲꦏ꧀ꦱꦫ", "𝔉𝔞𝔱𝔥𝔬𝔪 𝟙𝟚𝟛",
    "ⅫⅣ ½¾ ²³ ①②",
]
EMOJI = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇮🇸🇳🇿", "☕️", "🧜‍♀️", "❤️‍🔥", "🫠", "#️⃣", "⚓"]
MARKS = [
    "e\u0301", "a\u0323\u0302", "a\u0302\u0323", "o\u0308\u0304", "\u1100\u1161\u11a8",
    "\uac00\u11a8", "\u0041\u030a", "\u212b", "\u2126", "\u0958", "\u1e9b\u0323", "\u0344",
    "q\u0307\u0323", "\ufb01", "\u0301", "\u093c\u0915", "\u2adc", "\u0f73", "\u1e0a\u0323",
    "\u05d0\u05bc\u05b8",
]
SPACES = [
    " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u3000", "\u2003",
    "\u2028", "\u0085", "\u180e", "\u200b", "\ufeff", "\v", "\f", "\x1c", "\u1680", " \t \t",
]
CONTRACTIONS = [
    "I'm", "you'll", "we've", "it's", "don't", "they'd", "we're", "DON'T", "IT'S", "I'M",
    "o'clock", "'tis", "rock'n'roll", "x'\u017f", "''s", "'lL", "it\u2019s",
]
CODE = [
    "for (int i = 0; i < n; i++) {", "    return x->y[3] != 0x1F;", "def f(a, *b, **c):",
    "#include <stdio.h>", "printf(\"%d\\n\", a);", "\tif err != nil {\n\t\treturn err\n\t}",
    "SELECT * FROM t WHERE id=10;", "https://example.org/a/b?c=d&e=%20", "a&&b||!c",
    "</div><p class=\"x\">", "$$x^2_{i,j}$$", "/* ... */",
]
TOKENS = [
    "<|endoftext|>", "<|begin|>", "<|eot|>", "<tool>", "<tool_call>", "<mask>", "<|end", "<|",
    "<tool", "Caf\u00e9!", "Cafe\u0301!", "[PAD]", "  <mask>  ", "<tool>\n\n",
    "<tool_call><tool><tool_", "<|endoftext|><|endoftext|>", "<<|eot|>>",
]
RANGES = [
    (0x20, 0x7e), (0xa0, 0x24f), (0x300, 0x36f), (0x370, 0x5ff), (0x600, 0x6ff), (0x900, 0xdff),
    (0x1100, 0x11ff), (0x1e00, 0x1fff), (0x2000, 0x206f), (0x2100, 0x2bff), (0x3040, 0x33ff),
    (0x4e00, 0x4fff), (0xac00, 0xad00), (0xe000, 0xe010), (0xfb00, 0xffef), (0x1f300, 0x1f6ff),
    (0x1d400, 0x1d7ff), (0x0, 0x1f), (0x1f1e6, 0x1f1ff), (0xe0020, 0xe007f),
]


def words(r):
    return " ".join(r.choice(WORDS) for _ in range(r.randint(1, 7)))


def digits(r):
    form = r.choice(["{}", "{}.{}", "-{}", "{}e{}", "{},{}", "x{}y{}"])
    return form.format(r.randint(0, 10**9), r.randint(0, 999))


def spaces(r):
    return "".join(r.choice(SPACES) * r.choice([1, 1, 2, 9]) for _ in range(r.randint(1, 3)))


RUNS = ["a", " ", "\n", "\t", "=", "-", "é", "字", "👍", "0", "A", "\u0301", "ab", " .", "\r\n"]


def run(r):
    return r.choice(RUNS) * r.randint(2, 60)


def mixed(r):
    out = ""
    for _ in range(r.randint(1, 12)):
        low, high = r.choice(RANGES)
        out += chr(r.randint(low, high))
    return out


PARTS = [words, words, digits, spaces, run, mixed, mixed] + [
    (lambda choices: lambda r: r.choice(choices))(c)
    for c in (SCRIPTS, EMOJI, MARKS, MARKS, CONTRACTIONS, CODE, TOKENS, SPACES)]


def make_lines(count):
    r = random.Random(20)
    lines = ["", *SCRIPTS, *EMOJI, *MARKS, *SPACES, *CONTRACTIONS, *CODE, *TOKENS]
    while len(lines) < count:
        pieces = [r.choice(PARTS)(r) for _ in range(r.choice([1, 2, 3, 4]))]
        lines.append(r.choice(["", " "]).join(pieces))
    return lines


def train(lines, pre_tokenizer, size, specials, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    text = [line for line in lines if not any(token in line for token in TOKENS)]
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def make_prefix(lines):
    """GPT-2's way: one regular expression in ByteLevel, and a space before each text."""
    tokenizer = train(lines, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True),
                      700, ["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return json.loads(tokenizer.to_str())


def make_split(lines):
    """Llama 3's way: Split, a beginning token by template; ordinary added tokens."""
    steps = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                     pre_tokenizers.ByteLevel(add_prefix_space=False,
                                                              use_regex=False)])
    tokenizer = train(lines, steps, 800, ["<|begin|>", "<|endoftext|>", "<|eot|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin|> $A",
                                      special_tokens=[("<|begin|>", begin)])])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, rstrip=True),
                          AddedToken("<tool_call>"), AddedToken("  "), AddedToken("river")])
    data = json.loads(tokenizer.to_str())
    data["model"]["ignore_merges"] = True
    return data


def make_nfc(lines):
    """NFC, single digits, a literal split and the other behaviors; merges written as lines."""
    steps = pre_tokenizers.Sequence([
        pre_tokenizers.Split("->", "merged_with_next"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split(Regex(r"[\r\n]+|[.,;!?\w]+[-=[;:]]*"), "merged_with_previous"),
        pre_tokenizers.Split(Regex(r"(?=[A-Z])|\s+\h{2,4}"), "isolated"),
        pre_tokenizers.Split(Regex(r"\W+"), "contiguous", invert=True),
        pre_tokenizers.Split(Regex(r"\u00e9\v?|_"), "removed"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer = train(lines, steps, 900, ["<|endoftext|>"], normalizers.NFC())
    tokenizer.add_tokens([AddedToken("Cafe\u0301!", normalized=True),
                          AddedToken("[PAD]", normalized=False)])
    data = json.loads(tokenizer.to_str())
    data["model"]["merges"] = [" ".join(merge) for merge in data["model"]["merges"]]
    return data


MARK = "\u2581"


def make_pieces(lines, new_style):
    """SentencePiece's way: characters, a mark for a space, bytes for what has no piece. The older
    style puts the mark in the normalizer, the newer one in the pre-tokenizer, of the first text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    specials = ["<unk>", "<s>", "</s>"]
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=850, special_tokens=specials + all_bytes,
                                  show_progress=False, limit_alphabet=120)
    text = [line for line in lines if not any(token in line for token in TOKENS)]
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    end = max(data["model"]["vocab"].values()) + 1
    for i, (content, special, normalized) in enumerate(
            [("<|endoftext|>", True, False), ("<tool>", False, False), ("[PAD]", False, True)]):
        data["added_tokens"].append({
            "id": end + i, "content": content, "special": special, "normalized": normalized,
            "lstrip": False, "rstrip": content == "<tool>", "single_word": False})
    if new_style:
        data["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK,
                                 "prepend_scheme": "first", "split": True}
    else:
        data["pre_tokenizer"] = None
        data["normalizer"] = {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": MARK},
            {"type": "Replace", "pattern": {"String": " "}, "content": MARK}]}
    return data


def make_old_pieces(lines):
    return make_pieces(lines, False)


def make_new_pieces(lines):
    return make_pieces(lines, True)


def ids_text(tokenizer, lines):
    out = []
    for line in lines:
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(line, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = False
        special = tokenizer.encode(line, add_special_tokens=False).ids
        text = " ".join(map(str, plain))
        out.append(text if plain == special else text + "|" + " ".join(map(str, special)))
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", metavar="FOLDER", type=pathlib.Path)
    options = parser.parse_args()
    lines = make_lines(2200)
    if options.check:
        print(ids_text(Tokenizer.from_file(str(options.check / "tokenizer.json")), lines), end="")
        return
    OUT.mkdir(exist_ok=True)
    (OUT / "lines.json").write_text(json.dumps(lines, ensure_ascii=False, indent=0) + "\n",
                                    encoding="utf-8")
    (OUT / "tiny.ids").write_text(ids_text(Tokenizer.from_file(str(TINY)), lines))
    for name, make in (("prefix", make_prefix), ("split", make_split), ("nfc", make_nfc),
                       ("pieces", make_old_pieces), ("metaspace", make_new_pieces)):
        data = make(lines)
        (OUT / name).mkdir(exist_ok=True)
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        (OUT / name / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
        (OUT / f"{name}.ids").write_text(ids_text(Tokenizer.from_str(text), lines))


if __name__ == "__main__":
    main()
