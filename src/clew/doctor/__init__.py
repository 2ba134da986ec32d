"""The doctor: rules that look at what is known of a run and name the fault, live and on stored runs alike."""
