"""Models as strangers write them, each with what its export needs: PACKAGE.MODULE:FACTORY of the tests."""
