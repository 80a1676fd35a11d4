"""Rewriting the joint graph, so that it runs what eager PyTorch runs, in less memory."""
