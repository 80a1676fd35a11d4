"""Glue for training frameworks other than Lightning; each module here needs the framework that it is named after."""
