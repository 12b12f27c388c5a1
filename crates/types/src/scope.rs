use core::net::{IpAddr, SocketAddr, SocketAddrV6};

/// Whether the address is unique on one link only, so that it identifies a host only together with the device
/// (RFC 4007 §6).
pub fn is_scoped(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        // Groups of interface-local and link-local scope (RFC 4291 §2.7).
        IpAddr::V6(v6) if v6.is_multicast() => matches!(v6.octets()[1] & 0xf, 1 | 2),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// An endpoint on the link of `interface`; the device is included only if the address requires it.
pub fn scoped(address: IpAddr, port: u16, interface: u32) -> SocketAddr {
    match address {
        IpAddr::V6(v6) if is_scoped(address) => SocketAddrV6::new(v6, port, 0, interface).into(),
        _ => SocketAddr::new(address, port),
    }
}

/// The device in an endpoint; 0 if there is none.
pub fn scope_of(endpoint: SocketAddr) -> u32 {
    match endpoint {
        SocketAddr::V6(v6) if is_scoped(endpoint.ip()) => v6.scope_id(),
        _ => 0,
    }
}

/// The form of an endpoint used for comparisons: an IPv4-mapped address is replaced by the IPv4 address
/// (RFC 4291 §2.5.5.2); flow information and an irrelevant device are removed.
pub fn canonical(endpoint: SocketAddr) -> SocketAddr {
    scoped(
        endpoint.ip().to_canonical(),
        endpoint.port(),
        scope_of(endpoint),
    )
}

/// Encoding of endpoints in messages: serde's own omits the device.
pub mod endpoint {
    use core::net::{IpAddr, SocketAddr};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{scope_of, scoped};

    pub fn serialize<S: Serializer>(endpoint: &SocketAddr, to: S) -> Result<S::Ok, S::Error> {
        (endpoint.ip(), endpoint.port(), scope_of(*endpoint)).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
        let (ip, port, interface) = <(IpAddr, u16, u32)>::deserialize(from)?;
        Ok(scoped(ip, port, interface))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_link_local_endpoints_keep_their_device() {
        let with_scope = |text: &str| {
            let address: SocketAddrV6 = text.parse().unwrap();
            canonical(SocketAddrV6::new(*address.ip(), address.port(), 7, 3).into())
        };
        assert_eq!(scope_of(with_scope("[fe80::1]:5")), 3);
        assert_eq!(scope_of(with_scope("[ff02::1]:5")), 3);
        assert_eq!(scope_of(with_scope("[ff0e::1]:5")), 0);
        assert_eq!(with_scope("[fd00::1]:5"), "[fd00::1]:5".parse().unwrap());
        assert_eq!(
            with_scope("[::ffff:10.0.0.1]:5"),
            "10.0.0.1:5".parse().unwrap()
        );
    }
}
