"""The operator's side: the `pagestream` command. Nothing else in the package imports it."""
