"""An experiment harness for one question: what does the output layer cost when you pretrain linear RNNs?"""

import linrnn.losses  # noqa: F401  each loss adds its options to the configuration, whoever composes one
