//! Test beds of network namespaces, veth wires and impaired links; root only.
