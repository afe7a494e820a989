"""Sizes of known models, computed by hand from their public configurations."""

from eagle3.plans.facts import Attention, DraftFacts, Experts, TargetFacts


def llama_8b() -> TargetFacts:
    """Return the sizes of Llama-3.1-8B, which has 8.03e9 parameters."""
    hidden, vocab = 4096, 128256
    attention = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096
    layer = attention + 3 * 4096 * 14336 + 2 * 4096
    return TargetFacts(
        name="Llama-3.1-8B",
        num_parameters=32 * layer + 2 * vocab * hidden + hidden,
        layer_parameters=32 * layer,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=14336,
        tied=False,
        attention=Attention(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
        max_position_embeddings=131072,
    )


def llama_8b_head() -> DraftFacts:
    """Return the sizes of its published EAGLE-3 head.

    fc is 3d -> d, the layer's input has width 2d, and the draft vocabulary has 32,000 tokens.
    """
    layer = 8192 * 4096 + 2 * 8192 * 1024 + 4096 * 4096 + 3 * 4096 * 14336
    return DraftFacts(
        name="EAGLE3-Llama-3.1-8B",
        fuse_parameters=12288 * 4096,
        step_parameters=layer,
        lm_head_parameters=32000 * 4096,
        own_lm_head=True,
        draft_vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        feature_size=12288,
        attention=Attention(num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128),
    )


def smollm2() -> TargetFacts:
    """Return the sizes of SmolLM2-135M, whose lm_head is tied to the embedding."""
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    return TargetFacts(
        name="SmolLM2-135M",
        num_parameters=30 * layer + 49152 * 576 + 576,
        layer_parameters=30 * layer,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        tied=True,
        attention=Attention(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64),
        max_position_embeddings=8192,
    )


def mixture() -> TargetFacts:
    """Return the sizes of a mixture of 8 experts with 2 per token.

    It has 1,000 dense and 8,000 expert parameters.
    """
    return TargetFacts(
        name="mixture",
        num_parameters=9000 + 2 * 100 * 10,
        layer_parameters=9000,
        vocab_size=100,
        hidden_size=10,
        intermediate_size=20,
        tied=False,
        attention=Attention(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=5),
        experts=Experts(num_experts=8, per_token=2, parameters=8000),
    )
