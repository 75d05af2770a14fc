class BaseModelLoader:
    def load_model(self, model_config):
        raise AssertionError("the stand-in makes its model itself")
