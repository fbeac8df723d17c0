"""The demo: a small model learns one sentence under FSDP2 while a real SGLang serves what it has learnt so far."""
