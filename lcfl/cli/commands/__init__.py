"""The commands beside ``fit``, ``validate`` and ``test``: each module has a ``parser()`` and a ``main(args)``."""
