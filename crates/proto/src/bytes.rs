//! Bytes in messages, for `#[serde(with)]`: copied as a whole, where a sequence of numbers would be encoded
//! one by one. The encoding is the same.

use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    <&[u8]>::deserialize(deserializer).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize)]
    struct Whole(#[serde(with = "super")] Vec<u8>);

    #[test]
    fn bytes_are_encoded_as_a_sequence_of_numbers_would_be() {
        for length in [0, 1, 127, 128, 70_000] {
            let bytes: Vec<u8> = (0..length).map(|index| index as u8).collect();
            let encoded = crate::encode(&Whole(bytes.clone()));
            assert_eq!(encoded, crate::encode(&bytes));
            let decoded: Whole = crate::decode(&encoded).expect("as it was encoded");
            assert_eq!(decoded.0, bytes);
        }
    }
}
