"""An experiment harness for one question: what does the loss layer cost when you pretrain linear RNNs?"""

__version__ = "0.1.0"
