"""Federated data: data sets, the partitions that deal them out to clients, and each client's train, val and test.

``partition`` and ``protocols`` are pure functions of labels; ``datasets`` and ``samples`` know where inputs come from
and how a batch is gathered; ``datamodule`` puts them together. Nothing heavy is imported here.
"""
