"""Glue for training frameworks other than Lightning."""
