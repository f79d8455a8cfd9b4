//! The man page of the daemon's configuration, from the file that the package installs.

/// The file: comments, and values that are commented out.
pub const FILE: &str = include_str!("../debian/ebbd.toml");

const BEGIN: &str = r#".TH ebbd.toml 5 "" "Ebb" "Ebb"
.ad l
.nh
.SH NAME
ebbd.toml \- configuration of ebbd
.SH DESCRIPTION
The daemon ebbd(8) reads /etc/ebb/ebbd.toml when it starts and when it is reloaded. The format is
TOML. What is not there has the value that is shown here.
.SH KEYS
"#;
const END: &str = r".SH SEE ALSO
ebbd(8), /usr/share/doc/ebbd/host.md
";

/// The page of `file`. Its first paragraph is about the file itself; in each other one, lines that
/// begin with `# ` describe the values below them.
pub fn page(file: &str) -> String {
    let mut page = BEGIN.to_owned();
    for paragraph in file.split("\n\n").skip(1) {
        let is_text = |line: &&str| line.starts_with("# ");
        let text: Vec<_> = paragraph.lines().filter(is_text).collect();
        for (number, value) in paragraph.lines().filter(|line| !is_text(line)).enumerate() {
            page += if number == 0 { ".TP\n.B " } else { ".TQ\n.B " };
            page += &escaped(value.trim_start_matches('#'));
            page.push('\n');
        }
        for line in text {
            page += &escaped(line.trim_start_matches("# "));
            page.push('\n');
        }
    }
    page + END
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('"', "\\(dq")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ebbd::config::Config;
    use serde_json::Value;

    use super::*;

    fn keys(value: &Value, before: &str, found: &mut BTreeSet<String>) {
        for (key, value) in value.as_object().into_iter().flatten() {
            let key = format!("{before}{key}");
            keys(value, &format!("{key}."), found);
            found.insert(key);
        }
    }

    fn keys_of(text: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        keys(&toml::from_str(text).unwrap(), "", &mut found);
        found
    }

    /// The file with its values in force.
    fn in_force() -> String {
        let is_text = |rest: &str| rest.starts_with(' ');
        let value = FILE.lines().map(|line| match line.strip_prefix('#') {
            Some(rest) if !is_text(rest) => rest,
            _ => line,
        });
        value.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_file_has_the_defaults() {
        assert_eq!(Config::parse(FILE).unwrap(), Config::default());
        let mut all = Config::parse(&in_force()).unwrap();
        // These have no default that can be written.
        assert!(all.cgroup.take().is_some() && all.snapshots.take().is_some());
        assert!(all.policy.default.ceiling_bytes.take().is_some());
        assert_eq!(all, Config::default());
    }

    #[test]
    fn the_file_and_the_page_name_every_key() {
        let mut expected = BTreeSet::new();
        keys(&serde_json::to_value(Config::default()).unwrap(), "", &mut expected);
        assert_eq!(keys_of(&in_force()), expected);
        let page = page(FILE);
        for key in expected {
            let (_, name) = key.rsplit_once('.').unwrap_or(("", &key));
            assert!(page.contains(name), "{key}");
        }
    }
}
