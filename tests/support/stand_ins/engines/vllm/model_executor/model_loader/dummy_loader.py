class DummyModelLoader:
    def load_weights(self, model, model_config):
        raise AssertionError("the engine's own random weights, which are all alike")
