from lcfl.hooks import Callback


class Progress(Callback): ...
