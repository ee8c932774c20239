"""vLLM's plug-in: names fa3's attention backend, in every process that vLLM starts.

vLLM calls `register` by the entry point `vllm.general_plugins` of the installed package. The
backend itself, `fa3.integrations.vllm_backend`, is imported when it is chosen:
`--attention-backend CUSTOM`.
"""

BACKEND = "fa3.integrations.vllm_backend.Fa3Backend"


def register() -> None:
    """Let vLLM's backend CUSTOM be fa3's; may be called again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
