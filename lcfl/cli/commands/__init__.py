"""The commands except ``fit``, ``validate`` and ``test``. Each module has a ``parser()`` and a ``main(args)``."""
