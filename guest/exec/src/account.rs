//! Users of the guest, from its own `/etc/passwd` and `/etc/group` (passwd(5), group(5)).
//!
//! The agent is a static program, so users of other sources (LDAP, systemd-homed) are unknown to it.

use std::fs;

/// A user whose rights a command gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Name, if the user has one.
    pub name: Option<String>,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// All groups.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: String,
    /// Login shell.
    pub shell: String,
}

impl Account {
    /// Finds `USER[:GROUP]`; root without it.
    ///
    /// # Errors
    /// There is no such user or group; the text says so.
    pub fn find(wanted: Option<&str>) -> Result<Self, String> {
        // A guest without these files has root only.
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self::find_in(wanted.unwrap_or("0"), &read("/etc/passwd"), &read("/etc/group"))
    }

    fn find_in(wanted: &str, passwd: &str, group: &str) -> Result<Self, String> {
        let (user, wanted_group) = match wanted.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (wanted, None),
        };
        let number = user.parse::<u32>().ok();
        let entry = passwd.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [name, _, uid, gid, _, home, shell] = fields[..] else { return None };
            let (uid, gid) = (uid.parse().ok()?, gid.parse().ok()?);
            (name == user || number == Some(uid)).then_some((name, uid, gid, home, shell))
        });
        let (name, uid, mut gid, home, shell) = match (entry, number) {
            (Some((name, uid, gid, home, shell)), _) => (Some(name), uid, gid, home, shell),
            (None, Some(uid)) => (None, uid, uid, "/", ""),
            (None, None) => return Err(format!("the guest has no user {user}")),
        };
        let mut groups: Vec<u32> = Vec::new();
        if let Some(wanted) = wanted_group {
            gid = group_id(wanted, group)
                .ok_or_else(|| format!("the guest has no group {wanted}"))?;
        } else if let Some(name) = name {
            groups.extend(group.lines().filter_map(|line| {
                let fields: Vec<&str> = line.split(':').collect();
                let [_, _, gid, members] = fields[..] else { return None };
                members.split(',').any(|member| member == name).then(|| gid.parse::<u32>().ok())?
            }));
        }
        if !groups.contains(&gid) {
            groups.insert(0, gid);
        }
        Ok(Self {
            name: name.map(str::to_owned),
            uid,
            gid,
            groups,
            home: if home.is_empty() { "/" } else { home }.to_owned(),
            shell: if shell.is_empty() { "/bin/sh" } else { shell }.to_owned(),
        })
    }

    /// The variables of a login.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let path = if self.uid == 0 {
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        } else {
            "/usr/local/bin:/usr/bin:/bin"
        };
        let name = self.name.clone().unwrap_or_else(|| self.uid.to_string());
        vec![
            ("PATH", path.to_owned()),
            ("HOME", self.home.clone()),
            ("SHELL", self.shell.clone()),
            ("USER", name.clone()),
            ("LOGNAME", name),
        ]
    }
}

fn group_id(wanted: &str, group: &str) -> Option<u32> {
    wanted.parse().ok().or_else(|| {
        group.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next() == Some(wanted)).then(|| fields.nth(1)?.parse().ok())?
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\nweb:x:1000:1000:,,,:/home/web:\nbad:line";
    const GROUP: &str = "root:x:0:\nweb:x:1000:\nkvm:x:104:web,other\ndisk:x:6:other\nbad";

    #[test]
    fn users_are_found_by_name_and_number() {
        let find = |wanted| Account::find_in(wanted, PASSWD, GROUP);
        let web = find("web").unwrap();
        assert_eq!((web.uid, web.gid), (1000, 1000));
        assert_eq!(web.groups, [1000, 104]);
        assert_eq!((web.home.as_str(), web.shell.as_str()), ("/home/web", "/bin/sh"));
        assert_eq!(find("1000").unwrap(), web);
        let disk = find("web:disk").unwrap();
        assert_eq!((disk.gid, disk.groups), (6, vec![6]));
        let unknown = find("77:88").unwrap();
        assert_eq!((unknown.name, unknown.uid, unknown.gid), (None, 77, 88));
        assert_eq!(unknown.home, "/");
        assert_eq!(find("nothere").unwrap_err(), "the guest has no user nothere");
        assert_eq!(find("web:nothere").unwrap_err(), "the guest has no group nothere");
        assert!(find("").is_err());
    }

    #[test]
    fn a_guest_without_files_has_root() {
        let root = Account::find_in("0", "", "").unwrap();
        assert_eq!((root.uid, root.gid, root.groups), (0, 0, vec![0]));
    }
}
