//! Users and groups of this host by name and number, from `/etc/passwd` and `/etc/group`.

use std::fs;

/// The number of a user.
pub fn uid_of(name: &str) -> Option<u32> {
    number_of(name, &fs::read_to_string("/etc/passwd").ok()?)
}

/// The number of a group.
pub fn gid_of(name: &str) -> Option<u32> {
    number_of(name, &fs::read_to_string("/etc/group").ok()?)
}

/// The name of a user.
pub fn name_of(uid: u32) -> Option<String> {
    name_in(uid, &fs::read_to_string("/etc/passwd").ok()?)
}

/// Both files have the name first and the number third.
fn number_of(name: &str, file: &str) -> Option<u32> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    })
}

fn name_in(number: u32, file: &str) -> Option<String> {
    file.lines().find_map(|line| {
        let (name, rest) = line.split_once(':')?;
        let own: u32 = rest.split(':').nth(1)?.parse().ok()?;
        (own == number).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str =
        "root:x:0:0:root:/root:/bin/bash\nbroken\nwww:x:33:33::/var/www:/bin/false\n";

    #[test]
    fn names_and_numbers_lead_to_each_other() {
        assert_eq!(number_of("www", FILE), Some(33));
        assert_eq!(name_in(33, FILE).as_deref(), Some("www"));
    }

    #[test]
    fn what_is_not_there_is_not_found() {
        assert_eq!(number_of("ww", FILE), None);
        assert_eq!(number_of("broken", FILE), None);
        assert_eq!(name_in(34, FILE), None);
    }
}
