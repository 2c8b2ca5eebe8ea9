"""mBART targets: the labels end in EOS and then the language code, and decoder_input_ids are the labels with their LAST real token wrapped to the front
(shift_tokens_right of mBART in transformers). The decoder thus starts from the target's language, and the model is trained to say the code after EOS."""
FAMILY = "data stages and collators"
KIND = "collator"
INPUTS = {"rows": "list of dicts: 'src', 'tgt' (lists of token ids 4..39), 'src_lang', 'tgt_lang' (language ids 40..49)"}
SETTINGS = {}
NOTES = ("Pad id 1, EOS 2. Source: tokens EOS code. Labels: tokens EOS code, then -100. Decoder input: code tokens EOS, then pad, i.e. as long as the labels: no start token is added and none is cut. The source code stands at the END of the source (mBART of 2020, not mBART-50). "
         "Rows may have different target languages in one batch. All labels but the padding are trained, the language code too.")
import random
import torch

PAD, EOS = 1, 2


def right(rows):
    def pad(seqs):
        n = max(map(len, seqs))
        return torch.tensor([s + [PAD] * (n - len(s)) for s in seqs])

    source = pad([list(r["src"]) + [EOS, r["src_lang"]] for r in rows])
    target = pad([list(r["tgt"]) + [EOS, r["tgt_lang"]] for r in rows])
    last = (target != PAD).sum(1, keepdim=True) - 1
    decoder = target.clone()
    decoder[:, 1:] = target[:, :-1]
    decoder[:, :1] = target.gather(1, last)
    # the shift leaves the language code behind its row in shorter rows; it lies under padding and is replaced by it
    decoder = decoder.masked_fill(target == PAD, PAD)
    return {"input_ids": source, "attention_mask": (source != PAD).long(), "decoder_input_ids": decoder, "labels": target.masked_fill(target == PAD, -100)}


def make(seed):
    r = random.Random(seed)
    seq = lambda: [r.randint(4, 39) for _ in range(r.randint(1, 8))]
    return {"rows": [{"src": seq(), "tgt": seq(), "src_lang": r.randint(40, 49), "tgt_lang": r.randint(40, 49)} for _ in range(5)]}


if __name__ == "__main__":
    for seed in range(50):
        rows = make(seed)["rows"]
        b = right(rows)
        for i, row in enumerate(rows):
            n = len(row["tgt"]) + 2
            y, d = b["labels"][i].tolist(), b["decoder_input_ids"][i].tolist()
            assert y[:n] == row["tgt"] + [EOS, row["tgt_lang"]] and set(y[n:]) <= {-100}
            assert d[:n] == [row["tgt_lang"]] + row["tgt"] + [EOS] and set(d[n:]) <= {PAD}
            m = len(row["src"]) + 2
            assert b["input_ids"][i, :m].tolist() == row["src"] + [EOS, row["src_lang"]]
            assert b["attention_mask"][i].tolist() == [1] * m + [0] * (b["input_ids"].shape[1] - m)
            for t in range(n):               # teacher forcing: position t sees the code and tokens before t, and says token t
                assert d[1:t + 1] == y[:t]
    print("ok", y, d)
