"""The building blocks of the models, over the ops of pagestream_kernels."""
