"""Fastmax inside other libraries; each module needs its library and is imported on its own."""
