from lcfl.hooks import Callback


class Monitor(Callback): ...
