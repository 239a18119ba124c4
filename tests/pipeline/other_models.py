"""More models as people write them, and some that cannot be cut. Each builder gives (model, step, batch)."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.pipeline.models import causal_loss

_SMALL = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}
_WIDE = {**_SMALL, "intermediate_size": 24}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


# ---------------------------------------------------------------------------------------------------- transformers


def _transformers(model, config, batch, **extra):
    import transformers

    config, options = getattr(transformers, config[0]), config[1]
    model = getattr(transformers, model)(config(**options))
    if "Causal" in type(model).__name__:
        model.loss_function = causal_loss
    return model, lambda batch: model(**batch, **extra).loss, batch


def _text():
    ids = torch.randint(3, 60, (6, 10))
    mask = torch.ones_like(ids)
    mask[1, -3:] = mask[4, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _images(classes=3):
    return {"pixel_values": torch.randn(6, 3, 16, 16), "labels": torch.randint(classes, (6,))}


def qwen2():
    window = {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    return _transformers("Qwen2ForCausalLM", ("Qwen2Config", {**_WIDE, **window}), _text())


def t5():
    options = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    config = ("T5Config", {**options, "dropout_rate": 0.0, "decoder_start_token_id": 0})
    return _transformers("T5ForConditionalGeneration", config, _text())


def vit():
    sizes = {"image_size": 16, "patch_size": 4, "num_labels": 3}
    return _transformers("ViTForImageClassification", ("ViTConfig", {**_WIDE, **_NO_DROPOUT, **sizes}), _images())


def deberta():
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    return _transformers("DebertaV2ForMaskedLM", ("DebertaV2Config", {**_WIDE, **_NO_DROPOUT, **relative}), _text())


def albert():
    config = ("AlbertConfig", {**_WIDE, **_NO_DROPOUT, "embedding_size": 8})
    return _transformers("AlbertForMaskedLM", config, _text())


def siamese():
    """Compares two sentences by one encoder, called once for each."""
    text = _text()
    model, _, _ = _transformers("BertModel", ("BertConfig", {**_WIDE, **_NO_DROPOUT}), text)
    batch = [text["input_ids"], text["input_ids"].flip(1), text["attention_mask"], torch.rand(6)]

    def step(batch):
        first, second, mask, wanted = batch
        one, other = (model(ids, attention_mask=mask).last_hidden_state.mean(1) for ids in (first, second))
        return F.mse_loss(F.cosine_similarity(one, other), wanted)

    return model, step, batch


def hidden_states():
    """Asks for the hidden states of all layers, and does not use them."""
    config = ("LlamaConfig", {**_WIDE, "num_key_value_heads": 1})
    return _transformers("LlamaForCausalLM", config, _text(), output_hidden_states=True)


def router_losses():
    """The routers of all layers are collected by hooks for the loss."""
    options = {"num_key_value_heads": 1, "num_local_experts": 3, "output_router_logits": True}
    model, step, batch = _transformers("MixtralForCausalLM", ("MixtralConfig", {**_WIDE, **options}), _text())
    model.config._experts_implementation = "eager"
    return model, step, batch


# ----------------------------------------------------------------------------------------------------------- plain


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(8, 8), layers, nn.Linear(8, 3)

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.last(self.run(self.first(x)))


def _classified(model, x=None):
    x = torch.randn(6, 8) if x is None else x
    return model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (x, torch.randint(3, (len(x),)))


def _pictures(model):
    return _classified(model, torch.randn(6, 3, 8, 8))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(2, outputs))
        self.side = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.side(x))


class ResNet(nn.Module):
    """Groups of blocks as attributes, each larger than the one before."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(16, 3)
        self.layer1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8, 1))
        self.layer3 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))

    def forward(self, x):
        return self.head(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean((2, 3)))


def resnet():
    return _pictures(ResNet())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(4))

    def forward(self, x):
        x, state = self.embed(x), None
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(x[:, -1])


def lstm():
    return _classified(Recurrent(), torch.randint(20, (6, 7)))


def encoder_decoder():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.target, self.head = nn.Embedding(9, 8), nn.Embedding(9, 8), nn.Linear(8, 3)
            self.transformer = nn.Transformer(8, 2, 3, 3, 16, dropout=0.0, batch_first=True)

        def forward(self, x):
            return self.head(self.transformer(self.source(x), self.target(x)).mean(1))

    return _classified(Model(), torch.randint(9, (6, 5)))


def module_dict():
    class Model(Net):
        def run(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return x

    return _classified(Model(nn.ModuleDict({f"block_{i}": Block() for i in range(4)})))


def nested_lists():
    class Model(Net):
        def run(self, x):
            for norm, up, down in self.layers:
                x = x + down(up(norm(x)).tanh())
            return x

    def entry():
        return nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)])

    return _classified(Model(nn.ModuleList(entry() for _ in range(4))))


class Balanced(Block):
    """Adds to a list that it is given, and looks at its data."""

    def forward(self, x, losses):
        if x.isnan().any():
            raise ValueError("nan")
        losses.append(self.up(x).square().mean())
        return super().forward(x)


def losses_in_a_list():
    class Model(Net):
        def forward(self, x):
            x, losses = self.first(x), []
            for layer in self.layers:
                x = layer(x, losses)
            return self.last(x), sum(losses)

    model = Model(nn.ModuleList(Balanced() for _ in range(4)))

    def step(batch):
        logits, extra = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + extra

    return model, step, _classified(model)[2]


def a_changing_hook():
    model = Net(nn.ModuleList(Block() for _ in range(4)))
    for layer in model.layers:
        layer.up.register_forward_hook(lambda module, args, output: output * 0.5)
    return _classified(model)


# ---------------------------------------------------------------------------------------------------------- refused


def losses_in_attributes():
    class Layer(Block):
        def forward(self, x):
            if x.isnan().any():
                raise ValueError("nan")
            self.loss = self.up(x).square().mean()
            return super().forward(x)

    model = Net(nn.ModuleList(Layer() for _ in range(4)))
    _, step, batch = _classified(model)
    return model, lambda batch: step(batch) + sum(layer.loss for layer in model.layers), batch


def losses_in_hooks():
    model = Net(nn.ModuleList(Block() for _ in range(4)))
    kept = []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda module, args, output: kept.append(output.square().mean()))
    _, step, batch = _classified(model)

    def collected(batch):
        kept.clear()
        return step(batch) + sum(kept)

    return model, collected, batch


def losses_in_replaced_methods():
    """`forward` of inner modules is replaced for each call, as some libraries do to collect outputs."""
    model = Net(nn.ModuleList(Block() for _ in range(4)))
    _, step, batch = _classified(model)

    def collecting(module, kept):
        def forward(x):
            kept.append(type(module).forward(module, x))
            return kept[-1]

        return forward

    def collected(batch):
        kept = []
        for layer in model.layers:
            layer.up.forward = collecting(layer.up, kept)
        loss = step(batch) + sum(output.square().mean() for output in kept)
        for layer in model.layers:
            del layer.up.forward
        return loss

    return model, collected, batch


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, 2, 1) for _ in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(8, 4, 2, 2) for _ in range(3))

    def forward(self, x):
        x, kept = self.stem(x), []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1))
        return self.head(x.mean((2, 3)))


def unet():
    return _pictures(UNet())


def one_layer_four_times():
    return _classified(Net(nn.ModuleList([Block()] * 4)))


def returned_states():
    model = Net(nn.ModuleList(Block() for _ in range(4)))

    def step(batch):
        x = states = model.first(batch[0])
        for layer in model.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(model.last(x), batch[1]), "states": states}

    return model, step, _classified(model)[2]


def data_dependent():
    class Model(Net):
        def run(self, x):
            return super().run(x * 2 if x.mean() > 0 else x)

    return _classified(Model(nn.ModuleList(Block() for _ in range(4))))


def qwen3():
    """Norms of queries and keys, and grouped heads."""
    heads = {"num_key_value_heads": 1, "head_dim": 8}
    return _transformers("Qwen3ForCausalLM", ("Qwen3Config", {**_WIDE, **heads}), _text())


def gemma3():
    """Sliding windows in all layers but every third, and two tables of rotations."""
    heads = {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 3}
    config = ("Gemma3TextConfig", {**_WIDE, **heads, "query_pre_attn_scalar": 8})
    return _transformers("Gemma3ForCausalLM", config, _text())
