"""The only place that names SGLang internals. It adapts, it never decides."""
