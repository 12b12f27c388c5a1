//! The offloads of a NIC: segments a large TCP frame and completes checksums before the frame is on the
//! link. Input comes from a tap, behind a virtio-net header.

/// Bytes of the virtio-net header.
pub(crate) const VNET_HEADER: usize = 10;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`
const NEEDS_CHECKSUM: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_NONE`
const NOT_SEGMENTED: u8 = 0;

const ETHERNET_HEADER: usize = 14;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// The fields of a virtio-net header that are used here; in host order, as the tap writes them.
struct VnetHeader {
    flags: u8,
    gso_type: u8,
    gso_size: usize,
    checksum_start: usize,
    checksum_offset: usize,
}

impl VnetHeader {
    fn parse(bytes: &[u8; VNET_HEADER]) -> VnetHeader {
        let word = |at: usize| usize::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]));
        VnetHeader {
            flags: bytes[0],
            gso_type: bytes[1],
            gso_size: word(4),
            checksum_start: word(6),
            checksum_offset: word(8),
        }
    }
}

/// Returns the frames to be sent for one read from a tap, without virtio-net headers; none if the read is
/// not a frame.
pub(crate) fn wire_frames(read: &[u8]) -> Vec<Vec<u8>> {
    let Some((header, frame)) = read.split_first_chunk::<VNET_HEADER>() else {
        return Vec::new();
    };
    let header = VnetHeader::parse(header);
    if header.gso_type != NOT_SEGMENTED && header.gso_size != 0 {
        return segments(&header, frame).unwrap_or_default();
    }
    let mut frame = frame.to_vec();
    if header.flags & NEEDS_CHECKSUM != 0 {
        complete_checksum(&mut frame, header.checksum_start, header.checksum_offset);
    }
    vec![frame]
}

/// Completes a checksum whose field contains the sum of the pseudo-header.
fn complete_checksum(frame: &mut [u8], start: usize, offset: usize) {
    let field = start + offset;
    if frame.len() < field + 2 {
        return;
    }
    let checksum = match fold(sum(&frame[start..])) {
        // RFC 768: zero would mean "no checksum".
        0xffff => 0xffff,
        folded => !folded,
    };
    frame[field..field + 2].copy_from_slice(&checksum.to_be_bytes());
}

/// Segments a large TCP frame; the virtio-net header tells where TCP begins.
fn segments(header: &VnetHeader, frame: &[u8]) -> Option<Vec<Vec<u8>>> {
    let tcp = header.checksum_start;
    let data_offset = usize::from(*frame.get(tcp + 12)? >> 4) * 4;
    let payload_start = tcp + data_offset;
    let (headers, payload) = frame.split_at_checked(payload_start)?;
    let ip_header = if is_ipv4(frame) { 20 } else { 40 };
    if data_offset < 20 || tcp < ETHERNET_HEADER + ip_header {
        return None;
    }
    let last = payload.len().saturating_sub(1) / header.gso_size;
    let cut = payload.chunks(header.gso_size).enumerate();
    let segments = cut.map(|(index, chunk)| {
        let mut segment = headers.to_vec();
        segment.extend_from_slice(chunk);
        fix_ip(&mut segment, tcp, index as u16);
        let position = (index * header.gso_size) as u32;
        fix_tcp(&mut segment, tcp, position, index == 0, index == last);
        segment
    });
    Some(segments.collect())
}

/// Sets the length, and for IPv4 the identification and the header checksum.
fn fix_ip(frame: &mut [u8], tcp: usize, index: u16) {
    let ip = ETHERNET_HEADER;
    let length = frame.len();
    if is_ipv4(frame) {
        put(frame, ip + 2, (length - ip) as u16);
        let identification = take(frame, ip + 4).wrapping_add(index);
        put(frame, ip + 4, identification);
        put(frame, ip + 10, 0);
        let checksum = !fold(sum(&frame[ip..tcp]));
        put(frame, ip + 10, checksum);
    } else {
        put(frame, ip + 4, (length - ip - 40) as u16);
    }
}

/// Adjusts the sequence number, clears flags that belong to other segments, computes the checksum.
fn fix_tcp(frame: &mut [u8], tcp: usize, position: u32, first: bool, last: bool) {
    let sequence: [u8; 4] = std::array::from_fn(|index| frame[tcp + 4 + index]);
    let sequence = u32::from_be_bytes(sequence).wrapping_add(position);
    frame[tcp + 4..tcp + 8].copy_from_slice(&sequence.to_be_bytes());
    if !last {
        frame[tcp + 13] &= !(FIN | PSH);
    }
    if !first {
        // RFC 3168 §6.1.2: CWR goes with the first segment only.
        frame[tcp + 13] &= !CWR;
    }
    put(frame, tcp + 16, 0);
    let addresses = if is_ipv4(frame) {
        ETHERNET_HEADER + 12..ETHERNET_HEADER + 20
    } else {
        ETHERNET_HEADER + 8..ETHERNET_HEADER + 40
    };
    let length = (frame.len() - tcp) as u64;
    let pseudo = sum(&frame[addresses]) + u64::from(TCP) + length;
    let checksum = !fold(pseudo + sum(&frame[tcp..]));
    put(frame, tcp + 16, checksum);
}

/// Sets the codepoint CE if the sender is ECN-capable (RFC 3168 §5). Returns true if it was set.
pub(crate) fn mark(frame: &mut [u8]) -> bool {
    const CE: u8 = 3;
    let ip = ETHERNET_HEADER;
    if frame.len() < ip + 20 {
        return false;
    }
    if !is_ipv4(frame) {
        let allowed = frame[12..14] == ETHERTYPE_IPV6 && frame[ip + 1] >> 4 & CE != 0;
        frame[ip + 1] |= if allowed { CE << 4 } else { 0 };
        return allowed;
    }
    let end = ip + usize::from(frame[ip] & 0xf) * 4;
    if frame[ip + 1] & CE == 0 || frame.len() < end {
        return false;
    }
    frame[ip + 1] |= CE;
    put(frame, ip + 10, 0);
    let checksum = !fold(sum(&frame[ip..end]));
    put(frame, ip + 10, checksum);
    true
}

fn is_ipv4(frame: &[u8]) -> bool {
    frame[12..14] == ETHERTYPE_IPV4
}

fn take(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

fn put(frame: &mut [u8], at: usize, value: u16) {
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Returns the sum of the bytes as big-endian words (RFC 1071), before folding.
fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(2).map(|pair| {
        let second = pair.get(1).copied().unwrap_or(0);
        u64::from(u16::from_be_bytes([pair[0], second]))
    });
    words.sum()
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAYLOAD: usize = 3500;
    const MSS: usize = 1460;

    /// A large IPv4 or IPv6 TCP frame, as read from a tap.
    fn large(ipv4: bool) -> Vec<u8> {
        let ip_header = if ipv4 { 20 } else { 40 };
        let tcp = ETHERNET_HEADER + ip_header;
        let mut frame = vec![0; tcp + 20];
        frame[12..14].copy_from_slice(if ipv4 { &[0x08, 0] } else { &[0x86, 0xdd] });
        frame[ETHERNET_HEADER] = if ipv4 { 0x45 } else { 0x60 };
        put(&mut frame, ETHERNET_HEADER + 4, 0xffff);
        for byte in &mut frame[tcp - 8..tcp] {
            *byte = 7;
        }
        frame[tcp + 4..tcp + 8].copy_from_slice(&(u32::MAX - 1000).to_be_bytes());
        frame[tcp + 12] = 5 << 4;
        frame[tcp + 13] = FIN | PSH | CWR | 0x10;
        frame.extend((0..PAYLOAD).map(|index| index as u8));
        let mut read = vec![NEEDS_CHECKSUM, if ipv4 { 1 } else { 4 }];
        for word in [frame.len() - PAYLOAD, MSS, tcp, 16] {
            read.extend_from_slice(&(word as u16).to_ne_bytes());
        }
        read.extend(frame);
        read
    }

    /// Checks as a receiver does: pseudo-header and segment must sum to all ones.
    fn tcp_is_sound(frame: &[u8], tcp: usize) -> bool {
        let addresses = if is_ipv4(frame) { 26..34 } else { 22..54 };
        let pseudo = sum(&frame[addresses]) + 6 + (frame.len() - tcp) as u64;
        fold(pseudo + sum(&frame[tcp..])) == 0xffff
    }

    #[test]
    fn segments_carry_the_payload_with_right_numbers_flags_and_checksums() {
        for ipv4 in [true, false] {
            let tcp = ETHERNET_HEADER + if ipv4 { 20 } else { 40 };
            let segments = wire_frames(&large(ipv4));
            assert_eq!(segments.len(), 3);
            let mut payload = Vec::new();
            for (index, segment) in segments.iter().enumerate() {
                assert!(tcp_is_sound(segment, tcp), "segment {index}");
                let sequence = u32::from_be_bytes(segment[tcp + 4..tcp + 8].try_into().unwrap());
                let expected = (u32::MAX - 1000).wrapping_add(payload.len() as u32);
                assert_eq!(sequence, expected);
                let flags = segment[tcp + 13];
                assert_eq!(flags & (FIN | PSH) != 0, index == 2);
                assert_eq!(flags & CWR != 0, index == 0);
                payload.extend_from_slice(&segment[tcp + 20..]);
            }
            let expected: Vec<u8> = (0..PAYLOAD).map(|index| index as u8).collect();
            assert_eq!(payload, expected);
        }
    }

    #[test]
    fn ip_headers_are_made_anew() {
        for (index, segment) in wire_frames(&large(true)).iter().enumerate() {
            assert_eq!(usize::from(take(segment, 16)), segment.len() - 14);
            assert_eq!(take(segment, 18), 0xffff_u16.wrapping_add(index as u16));
            assert_eq!(fold(sum(&segment[14..34])), 0xffff);
        }
        for segment in wire_frames(&large(false)) {
            assert_eq!(usize::from(take(&segment, 18)), segment.len() - 54);
        }
    }

    #[test]
    fn only_what_may_be_marked_is() {
        for ipv4 in [true, false] {
            let mut frame = wire_frames(&large(ipv4)).remove(0);
            assert!(!mark(&mut frame));
            frame[ETHERNET_HEADER + 1] |= if ipv4 { 2 } else { 0x20 };
            assert!(mark(&mut frame));
            let shift = if ipv4 { 0 } else { 4 };
            assert_eq!(frame[ETHERNET_HEADER + 1] >> shift & 3, 3);
            assert!(!ipv4 || fold(sum(&frame[14..34])) == 0xffff);
        }
        assert!(!mark(&mut [0; 20]));
    }

    #[test]
    fn a_small_frame_gets_its_checksum_completed() {
        let mut read = large(true);
        read.truncate(VNET_HEADER + 54 + 11);
        read[1] = NOT_SEGMENTED;
        let pseudo = sum(&read[VNET_HEADER + 26..VNET_HEADER + 34]) + 6 + 31;
        put(&mut read, VNET_HEADER + 50, fold(pseudo));
        let frames = wire_frames(&read);
        assert_eq!(frames.len(), 1);
        assert!(tcp_is_sound(&frames[0], 34));
    }

    #[test]
    fn rubbish_is_no_frame_and_no_panic() {
        let whole = large(true);
        for length in 0..whole.len() {
            wire_frames(&whole[..length]);
        }
        let mut wild = whole;
        for start in [0, 13, 14, 34, 60, u16::MAX] {
            wild[6..8].copy_from_slice(&start.to_ne_bytes());
            wire_frames(&wild);
        }
        assert!(wire_frames(&wild).is_empty());
    }
}
